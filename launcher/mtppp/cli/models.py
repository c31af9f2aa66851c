"""A model's facts for commands that can do without them."""

from __future__ import annotations

from pathlib import Path

from mtppp.errors import MtpppError
from mtppp.model.config import find_config
from mtppp.model.facts import ModelFacts, read_facts


def facts_of(
    model: str, revision: str | None, config: Path | None
) -> tuple[ModelFacts | None, str]:
    """The model's facts, or None and why its config.json is not to be had here.

    Raises:
        MtpppError: the file the operator named, or the one found, is no model's configuration.
    """
    if config is not None:
        return read_facts(find_config(str(config)).values), ""
    try:
        found = find_config(model, revision=revision)
    except MtpppError as error:
        return None, error.message
    return read_facts(found.values), ""
