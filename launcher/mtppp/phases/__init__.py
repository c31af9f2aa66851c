"""The steps of a launch and of a stop, one file each; only this room orders them."""
