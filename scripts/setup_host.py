"""What `scripts/test` and `scripts/demo` need on this machine, and how they come by it.

Standard library only: it runs on the system's python3 before anything is installed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
MARKER = VENV / "mtppp-setup"
# program -> Debian package
LAB_PROGRAMS = {"sshd": "openssh-server", "ssh": "openssh-client", "ip": "iproute2"}
# library -> Debian package; what vLLM's compiled parts for CPUs link to and wheels do not bring
VLLM_LIBRARIES = {"libnuma.so.1": "libnuma1"}


class SetupError(Exception):
    """Something needed is missing and cannot be installed; the message is one line."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(*command: str | Path, env: Mapping[str, str] | None = None) -> int:
    """Run with our own output streams; the exit status."""
    merged = {**os.environ, **(env or {})}
    return subprocess.run([str(part) for part in command], env=merged, check=False).returncode


def require_python() -> None:
    """Fail unless this python is new enough."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this is what finds out
        raise SetupError(f"python 3.11 or newer is needed; this is {sys.version.split()[0]}")


def virtual_environment(extra: str | None) -> Path:
    """The clone's own environment with mtppp and an extra of pyproject.toml; its bin directory.

    Re-used while pyproject.toml stays as it is.
    """
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    have = MARKER.read_text().split() if MARKER.exists() else []
    binaries = VENV / "bin"
    if have[:1] == [wanted] and (extra is None or extra in have[1:]):
        say(f"Using mtppp's environment in {VENV}")
        return binaries
    what = f".[{extra}]" if extra else "."
    say(f"Installing mtppp{' and what its tests need' if extra else ''} into {VENV}: 150 MB")
    if not (binaries / "python").exists() and run(sys.executable, "-m", "venv", VENV):
        raise SetupError("python cannot make a virtual environment: apt-get install python3-venv")
    pip = (binaries / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    if run(*pip, "--editable", f"{ROOT}/{what}"):
        raise SetupError("pip could not install mtppp; its messages are above")
    MARKER.write_text(" ".join([wanted, *([extra] if extra else [])]))
    return binaries


def lab_packages() -> None:
    """Install the Debian packages of the lab's programs that are missing; needs root for that."""
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    install({p for name, p in LAB_PROGRAMS.items() if not shutil.which(name, path=search)})


def loadable(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def install(packages: set[str]) -> None:
    """Install Debian packages, if any.

    Raises:
        SetupError: naming them, where there is no root or no apt-get.
    """
    missing = sorted(packages)
    if not missing:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise SetupError(f"missing: {', '.join(missing)}; apt-get install {' '.join(missing)}")
    say(f"Installing {', '.join(missing)} with apt-get")
    noninteractive = {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *missing]):
        quiet = ["apt-get", "-qq", "-o", "Dpkg::Use-Pty=0", *command]
        if run(*quiet, env=noninteractive):
            raise SetupError(f"`{' '.join(quiet)}` failed; its messages are above")


def vllm_environment(release: str) -> Path:
    """The python of a vLLM environment, made if need be, with the libraries it needs."""
    install({package for name, package in VLLM_LIBRARIES.items() if not loadable(name)})
    made = subprocess.run(
        [sys.executable, str(ROOT / "scripts/environment"), release],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if made.returncode:
        raise SetupError(f"no environment with vLLM {release} could be made")
    return Path(made.stdout.strip())


def guarded(main: Callable[[], int]) -> int:
    """Run `main()`; a SetupError becomes one line and exit status 1."""
    try:
        return main()
    except SetupError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
