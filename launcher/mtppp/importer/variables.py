"""Variables of the commands become runtime.env and secrets of the file."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mtppp.cluster.managed import looks_secret, reserved_env
from mtppp.errors import ConfigurationError, Refused
from mtppp.importer.arguments import no_value
from mtppp.importer.commands import ServeCommand
from mtppp.importer.draft import Draft


def take_environment(draft: Draft, commands: Sequence[ServeCommand]) -> None:
    values: dict[str, set[str]] = {}
    for command in commands:
        for name, word in command.env.items():
            if name in ("PATH", "HOME"):
                continue
            values.setdefault(name, set()).add(word.text)
            if looks_secret(name):
                _take_secret(draft, name)
            elif name != "VLLM_PP_LAYER_PARTITION" and reserved_env(name) is not None:
                continue
            elif word.unknown:
                raise no_value(command.where, name, word.unknown)
        for name in command.passed_on:
            _take_secret(draft, name)
    for name, held in values.items():
        if looks_secret(name):
            continue
        if len(held) > 1 and reserved_env(name) is None:
            raise Refused(
                f"{name} differs between the nodes: {', '.join(sorted(held))}",
                hint="runtime.env has one value for all nodes; set it to one that is right on each",
            )
        _take_variable(draft, name, next(iter(held)))


def _take_secret(draft: Draft, name: str) -> None:
    if reserved_env(name) is not None or name in draft.secrets:
        return
    draft.secrets.append(name)
    draft.note(
        "changed",
        name,
        "under secrets now, its value left out: export it where you run mtppp",
    )


def _take_variable(draft: Draft, name: str, value: str) -> None:
    reason = reserved_env(name)
    if name == "VLLM_PP_LAYER_PARTITION":
        if not re.fullmatch(r"\d+(,\d+)*", value):
            raise ConfigurationError(f"{name}={value}: must be numbers such as 42,36")
        draft.partition = tuple(int(count) for count in value.split(","))
        draft.note("moved", name, "parallel.layer_partition in the file")
    elif name == "VLLM_USE_V2_MODEL_RUNNER" and value == "0":
        draft.note("changed", f"{name}=0", f"left out: {reason}")
    elif reason is not None:
        draft.note("moved", name, reason)
    else:
        draft.env[name] = value
