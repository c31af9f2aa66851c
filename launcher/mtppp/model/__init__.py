"""A model's facts from its config.json: layers, sizes, couplings. Pure, apart from `config`."""
