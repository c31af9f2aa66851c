"""The plugins that go to the nodes: one directory, named by the hash of what is in it.

Python finds the entry points of a directory on its path through a `*.dist-info` beside the
packages. The installed distribution `mtppp` declares none, so having it installed next to vLLM
changes nothing; only a process with this directory on its PYTHONPATH sees the plugins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, util
from pathlib import Path

from mtppp import __version__


@dataclass(frozen=True, slots=True)
class PluginBundle:
    """Files by path relative to the directory, and the name of the directory."""

    name: str
    files: Mapping[str, bytes]


def bundle(packages: Sequence[str]) -> PluginBundle:
    """The bundle of these packages, as installed beside the launcher.

    Each package has a module `entry_points` with its ENTRY_POINTS: group -> name -> value.
    """
    files: dict[str, bytes] = {}
    for package in packages:
        files.update(_sources(package))
    dist_info = f"mtppp_plugins-{__version__}.dist-info"
    files[f"{dist_info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: mtppp-plugins\nVersion: {__version__}\n".encode()
    )
    files[f"{dist_info}/entry_points.txt"] = _entry_points(packages).encode()
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path}\0{len(files[path])}\0".encode() + files[path])
    return PluginBundle(name=digest.hexdigest()[:16], files=files)


def _sources(package: str) -> dict[str, bytes]:
    spec = util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(package)
    root = Path(spec.origin).parent
    return {
        f"{package}/{path.relative_to(root).as_posix()}": path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.suffix in {".py", ".json"}
    }


def _entry_points(packages: Sequence[str]) -> str:
    groups: dict[str, list[str]] = {}
    for package in packages:
        for group, points in import_module(f"{package}.entry_points").ENTRY_POINTS.items():
            groups.setdefault(group, []).extend(f"{name} = {at}" for name, at in points.items())
    return "\n".join(
        f"[{group}]\n" + "\n".join(lines) + "\n" for group, lines in sorted(groups.items())
    )
