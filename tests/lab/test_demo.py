"""The README's demo as an ordinary user, on a clone of what is checked out here."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab_driver import CHECKOUT

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

NOBODY = 65534

# The environments are below root's home, which nobody else may enter. In a mount namespace of its
# own an overlay lets them in, and keeps what they write away from the real files.
AS_NOBODY = """
set -e
mount -t overlay overlay -o "lowerdir=$HOME,upperdir=$1/upper,workdir=$1/work" "$HOME"
chmod 755 "$HOME"
chmod a+rw "$MTPPP_CACHE"/*.lock
exec setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs \
    env HOME="$1/home" "$1/home/clone/scripts/demo"
"""


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that others may enter; pytest's own are closed again by each of its runs."""
    with tempfile.TemporaryDirectory(prefix="mtppp-demo-", dir="/var/tmp") as name:
        directory = Path(name)
        directory.chmod(0o755)
        yield directory


def test_demo_as_an_ordinary_user(open_directory: Path, vllm_python: Callable[[str], Path]) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    cache = vllm_python("0.32.0").parents[2]
    for name in ("upper", "work", "home"):
        (open_directory / name).mkdir()
    clone = open_directory / "home" / "clone"
    subprocess.run(["git", "clone", "--quiet", CHECKOUT, clone], check=True)
    subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", open_directory / "home"], check=True)
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", AS_NOBODY, "bash", open_directory],
        env={
            **kept,
            "HOME": str(Path.home()),
            "PATH": f"{Path(sys.base_prefix) / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin",
            "MTPPP_CACHE": str(cache),
        },
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    copied = "'Repeat: 21 olive lemon water;'\n    -> ' 21 olive lemon water; 21 olive lemon water"
    assert copied in done.stdout, done.stdout
    assert "assistant: " in done.stdout
    assert "ended on demo-a, demo-b" in done.stderr
    assert not list(Path("/var/tmp/mtppp-65534").glob("*/*/processes.json"))
