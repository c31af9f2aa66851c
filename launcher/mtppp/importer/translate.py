"""From the commands of one deployment to a draft of its cluster file.

Only what the commands say, and what cannot be in a cluster file. What the model makes of it is
judged afterwards (`judge`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from mtppp.errors import ConfigurationError
from mtppp.importer.arguments import FlagTaker, no_value
from mtppp.importer.commands import ServeCommand
from mtppp.importer.draft import Draft
from mtppp.importer.flags import Parsed, parse_flags, table
from mtppp.importer.nodes import count_gpus, head_of, node_count, nodes_of, note_nodes
from mtppp.importer.shell import Word
from mtppp.importer.variables import take_environment
from mtppp.importer.wishes import Wishes

DEFAULT_PYTHON = "/opt/vllm/bin/python"

_HF_CACHE_IN_CONTAINER = "/root/.cache/huggingface"
_CPU_VARIABLES = re.compile(r"VLLM_CPU_[A-Z_]+")


def translate(
    commands: Sequence[ServeCommand], wishes: Wishes, *, default_release: str, base: Path
) -> Draft:
    """A draft with everything that the commands say.

    Args:
        commands: one, or one per node.
        default_release: vLLM's, where neither wishes nor image say one.
        base: the directory that a `--config` file is looked for in.

    Raises:
        ConfigurationError: there is no model, a value is not known, or these are several
            deployments.
        Refused: the commands of the nodes contradict each other.
    """
    parsed = [_with_config(parse_flags(command.arguments), base) for command in commands]
    head = head_of(commands, parsed)
    command, flags = commands[head], parsed[head]
    model = _model(command, flags)
    count = node_count(flags, wishes, len(commands))
    nodes = nodes_of(commands, parsed, wishes, count)
    draft = Draft(
        name=wishes.name or name_of(model),
        model=model,
        nodes=nodes,
        gpus=1,
        vllm=wishes.vllm or _image_release(command) or default_release,
        python=wishes.python or ("" if wishes.managed else command.python or DEFAULT_PYTHON),
        managed=wishes.managed,
        gpu_type=wishes.gpu_type,
        release_from="wish" if wishes.vllm else "image" if _image_release(command) else "default",
    )
    draft.ssh_config = wishes.ssh_config
    _take_device(draft, command, wishes)
    FlagTaker(draft, flags).take_all()
    if not wishes.nodes and len(commands) == 1 and "nnodes" not in flags.flags:
        draft.note(
            "fill in",
            "nodes",
            f"the command does not say how many; taken for {count}, "
            + ("one for each stage" if count == draft.pipeline else f"{draft.pipeline} stages")
            + " (or give --node for each, in pipeline order)",
        )
    take_environment(draft, commands)
    note_nodes(draft)
    _note_runtime(draft, command, wishes)
    count_gpus(draft, wishes)
    _note_flags_of_other_releases(draft)
    return draft


def _with_config(parsed: Parsed, base: Path) -> Parsed:
    """The flags of a `--config` file are those of the command, which wins where both have one."""
    given = parsed.flags.pop("config", None)
    if given is None:
        return parsed
    path = base / str(given.value)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(
            f"--config {given.value}: cannot be read: {error}",
            hint="import where the file is, or write its flags into the command",
        ) from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"--config {given.value}: is no mapping of flags to values")
    words: list[Word] = []
    for key, value in values.items():
        words += _words_of(str(key), value)
    file = parse_flags(words)
    if parsed.model is None and "model" in file.flags:
        parsed.model = Word(str(file.flags.pop("model").value))
    parsed.flags = {**file.flags, **parsed.flags}
    return parsed


def _words_of(key: str, value: Any) -> list[Word]:
    match value:
        case True:
            return [Word(f"--{key}")]
        case False:
            is_switch = f"--no-{key.replace('_', '-')}" in table().by_option
            return [Word(f"--no-{key}")] if is_switch else []
        case list():
            return [Word(f"--{key}"), *(Word(str(item)) for item in value)] if value else []
        case dict():
            return [Word(f"--{key}"), Word(json.dumps(value))]
        case _:
            return [Word(f"--{key}"), Word(str(value))]


def _model(command: ServeCommand, flags: Parsed) -> str:
    given = flags.flags.pop("model", None)
    word = flags.model or (Word(str(given.value), given.unknown) if given else None)
    if word is None:
        raise ConfigurationError(
            f"{command.where}: the command names no model",
            hint="vllm serve ORGANISATION/NAME ...",
        )
    if flags.surplus:
        extra = " ".join(word.text for word in flags.surplus)
        raise ConfigurationError(
            f"{command.where}: {extra!r} belongs to no flag",
            hint="is a line without its backslash, or a value without its quotes?",
        )
    if word.unknown:
        raise no_value(command.where, "the model", word.unknown)
    return command.container.on_host(word.text) if command.container else word.text


def _take_device(draft: Draft, command: ServeCommand, wishes: Wishes) -> None:
    """CPUs where the command's variables or its image say so; no flag of vLLM does."""
    signs = [name for name in command.env if _CPU_VARIABLES.fullmatch(name)]
    if command.container and command.container.is_for_cpus:
        signs.append(command.container.image)
    draft.device = wishes.device or ("cpu" if signs else "cuda")
    if draft.device == "cuda":
        return
    if draft.gpu_type:
        raise ConfigurationError(
            f"--gpu {draft.gpu_type}, and the command is for CPUs",
            hint="leave --gpu out, or say --device cuda",
        )
    draft.comments["runtime", "device"] = "for demonstrations and tests: far too slow to serve with"
    if signs and wishes.device is None:
        draft.note("moved", signs[0], "runtime.device: cpu in the file")


def _image_release(command: ServeCommand) -> str | None:
    return command.container.release if command.container else None


def _note_runtime(draft: Draft, command: ServeCommand, wishes: Wishes) -> None:
    container = command.container
    if container is not None:
        draft.note(
            "changed",
            container.image,
            "mtppp runs vLLM from a Python on every node, not from an image"
            + (
                ", and makes that"
                if wishes.managed
                else f": install vllm=={draft.vllm} and ray>=2.60 there, or import with --managed"
            ),
        )
        _note_cache(draft, command)
    if wishes.managed:
        draft.comments["runtime", "environment"] = "mtppp installs vLLM on every node, locked"
    elif wishes.python is None and command.python is None:
        draft.comments["runtime", "python"] = "SET THIS: the Python on every node that has vLLM"
        draft.note(
            "fill in",
            "runtime.python",
            f"the Python on every node that has vLLM and Ray; {draft.python} holds its place "
            "(or import with --python, or with --managed: mtppp installs both)",
        )


def _note_cache(draft: Draft, command: ServeCommand) -> None:
    assert command.container is not None
    host = command.container.on_host(_HF_CACHE_IN_CONTAINER)
    if host in (_HF_CACHE_IN_CONTAINER, "~/.cache/huggingface") or "HF_HOME" in draft.env:
        return
    if host.startswith("/"):
        draft.env["HF_HOME"] = host
        draft.note("changed", "HF_HOME", f"set to {host}, which the container had as its cache")


def _note_flags_of_other_releases(draft: Draft) -> None:
    if draft.vllm not in table().releases:
        return
    for name in draft.args:
        flag = table().by_option.get(f"--{name}")
        if flag is not None and draft.vllm not in flag.releases:
            draft.note(
                "warning",
                f"--{name}",
                f"vLLM {draft.vllm} has no such flag; {flag.releases[0]} to {flag.releases[-1]} "
                "have",
            )


def name_of(model: str) -> str:
    """A deployment's name after its model."""
    name = re.sub(r"[^a-z0-9.-]+", "-", PurePosixPath(model).name.lower()).strip(".-")
    return name[:40] or "imported"
