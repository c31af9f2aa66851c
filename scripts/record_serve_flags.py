"""Records the flags of `vllm serve` for `mtppp import`: their names, short forms and values.

    PYTHON scripts/record_serve_flags.py

PYTHON has vLLM. What its parser accepts is merged into launcher/mtppp/importer/serve_flags.json,
under the release that is installed. Needs no GPU, and starts nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "launcher/mtppp/importer/serve_flags.json"

# Where the parser is made has moved between releases.
MODULES = (
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.cli_args",
)

_NUMBERS = {
    "int": "integer",
    "float": "number",
    "human_readable_int": "size",
    "human_readable_int_or_auto": "size",
}


def main() -> None:
    from vllm.version import __version__  # noqa: PLC0415 - only where vLLM is

    release = __version__.partition("+")[0]
    known = json.loads(FILE.read_text()) if FILE.exists() else {"releases": [], "flags": {}}
    merged = merge(known, release, flags_of(parser()))
    FILE.write_text(written(merged))
    print(f"{release}: {len(merged['flags'])} flags in {FILE}")


def parser() -> argparse.ArgumentParser:
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if hasattr(module, "make_arg_parser"):
            made: argparse.ArgumentParser = module.make_arg_parser(FlexibleArgumentParser())
            return made
    raise SystemExit(f"no module has make_arg_parser: {', '.join(MODULES)}")


def flags_of(made: argparse.ArgumentParser) -> dict[str, dict[str, Any]]:
    """Flag without dashes -> what it takes, its kind of value and its other names."""
    return {
        names[0]: {
            "takes": _takes(action),
            **({"kind": kind} if (kind := _NUMBERS.get(_type(action))) else {}),
            **({"also": also} if (also := [*names[1:], *_short(action)]) else {}),
        }
        for action in made._actions
        if (names := _long(action)) and names[0] != "help"
    }


def _long(action: argparse.Action) -> list[str]:
    """Long names; `--no-x` of a switch is implied by `takes`."""
    names = [option[2:] for option in action.option_strings if option.startswith("--")]
    if isinstance(action, argparse.BooleanOptionalAction):
        return [name for name in names if not name.startswith("no-")]
    return names


def _short(action: argparse.Action) -> list[str]:
    return [option for option in action.option_strings if not option.startswith("--")]


def _type(action: argparse.Action) -> str:
    return str(getattr(action.type, "__name__", ""))


def _takes(action: argparse.Action) -> str:
    if isinstance(action, argparse.BooleanOptionalAction):
        return "switch"
    if action.nargs == 0:
        return "nothing"
    return {"+": "many", "*": "many", "?": "optional"}.get(str(action.nargs), "one")


def merge(known: dict[str, Any], release: str, flags: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """`known` with this release's flags; a flag's shape is that of the newest release with it."""
    order = sorted({*known["releases"], release}, key=_version)
    merged: dict[str, dict[str, Any]] = {}
    for name in sorted({*known["flags"], *flags}):
        before = known["flags"].get(name, {})
        releases = {r for r in before.get("in", known["releases"]) if before and r != release}
        if name in flags:
            releases.add(release)
        if not releases:
            continue
        newest = max(releases, key=_version)
        entry = flags[name] if newest == release else before
        shape = {key: value for key, value in entry.items() if key != "in"}
        everywhere = releases == set(order)
        merged[name] = shape | ({} if everywhere else {"in": sorted(releases, key=_version)})
    return {"releases": order, "flags": merged}


def _version(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def written(data: dict[str, Any]) -> str:
    """One line a flag, so that a new release reads well as a difference."""
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in data["flags"].items()]
    body = ",\n".join(lines)
    return f'{{\n "releases": {json.dumps(data["releases"])},\n "flags": {{\n{body}\n }}\n}}\n'


if __name__ == "__main__":
    main()
