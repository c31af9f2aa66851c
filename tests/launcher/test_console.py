"""What a person sees of steps and errors, on terminals of any width and without one."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from mtppp.console import Console

COMMAND = "$ echo 'n1 ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFt2APg+EzCRZUE6bVBdp' >> known_hosts"
SCRIPT = f"""
COMMAND = {COMMAND!r}
from mtppp.console import Console
from mtppp.errors import MtpppError
console = Console()
with console.step("running") as step:
    step.note = "server on n1 has ended; rank 1 on n2 has ended; brought back: the server"
console.error(MtpppError(
    "n1: unknown host key",
    details=["  hint: compare it first. Then:", COMMAND],
    hint="compare it first. Then:\\n" + COMMAND,
))
console.error(MtpppError(
    "n1: port 8000 is taken [by deployment demo]; set serve.port to a free one",
    details=["(EngineCore pid=7) ERROR 11-29 14:31:01 [core.py:15] RuntimeError: it failed"],
    hint="the log is /var/tmp/mtppp-1000/demo/0/server-of-a-very-long-name.log there",
))
from mtppp.console import folded
print(folded("  n1: ray up, server up, launched by ann@desk at 2026-11-29T21:30:12+00:00"))
"""
WORDS = (
    "✓ running server on n1 has ended; rank 1 on n2 has ended; brought back: the server (0.0 s)"
    f" error: n1: unknown host key │ hint: compare it first. Then: │ {COMMAND}"
    f" hint: compare it first. Then: {COMMAND}"
    " error: n1: port 8000 is taken [by deployment demo]; set serve.port to a free one"
    " │ (EngineCore pid=7) ERROR 11-29 14:31:01 [core.py:15] RuntimeError: it failed"
    " hint: the log is /var/tmp/mtppp-1000/demo/0/server-of-a-very-long-name.log there"
    " n1: ray up, server up, launched by ann@desk at 2026-11-29T21:30:12+00:00"
)
COUNTING = """
from mtppp.console import Console
with Console().step("self-score") as step:
    step.count("greedy answers", 3, 40)
"""
OUTLIVES = """
import sys
from mtppp.console import Console
console = Console()
with console.step("a") as step:
    if sys.argv[1] == "within":
        sys.stdin.readline()
    step.progress("it goes on")
if sys.argv[1] == "between":
    sys.stdin.readline()
with console.step("b") as step:
    step.progress("and on")
console.say("to its end")
print("done")
"""
LONGEST = "/var/tmp/mtppp-1000/demo/0/server-of-a-very-long-name.log"


def shown(columns: int, script: str = SCRIPT) -> str:
    """What a script shows on a terminal of that width."""
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    environment.pop("COLUMNS", None)
    subprocess.run(
        [sys.executable, "-c", script], env=environment, stdout=there, stderr=there, check=True
    )
    os.close(there)
    text = b""
    while True:
        try:
            text += os.read(here, 1 << 16)
        except OSError:
            break
    os.close(here)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.decode()).replace("\r", "")
    plain = re.sub(r"\(\d+\.\d", "(0.0", plain)
    # What is happening right now is shown before a turning sign, and replaced.
    return re.sub(r"^[\u2800-\u28ff] running *\n?", "", plain, flags=re.MULTILINE)


@pytest.mark.parametrize("columns", [30, 40, 80, 200])
def test_lines_are_folded_between_words(columns: int) -> None:
    text = shown(columns)
    assert text.split() == WORDS.split()
    too_long = [line for line in text.splitlines() if len(line) > columns]
    assert all(LONGEST in line or COMMAND in line for line in too_long), text
    assert [line.lstrip(" │") for line in text.splitlines() if "$" in line] == [COMMAND] * 2


def test_without_a_terminal_lines_stay_whole() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    lines = re.sub(r"\(\d+\.\d", "(0.0", done.stderr + done.stdout).splitlines()
    assert len(lines) == 10
    assert " ".join(lines).split() == WORDS.split()


@pytest.mark.parametrize(
    ("of", "said"), [(16, [16]), (40, [16, 32, 40]), (300, [75, 150, 225, 300])]
)
def test_without_a_terminal_what_is_counted_is_said_at_each_quarter(
    of: int, said: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    with Console().step("self-score") as step:
        for finished in range(1, of + 1):
            step.count("greedy answers", finished, of)
    *lines, end = capsys.readouterr().err.splitlines()
    assert lines == [f"  … self-score     greedy answers: {at} of {of}" for at in said]
    assert end.startswith("  ✓ self-score")


def test_on_a_terminal_each_one_is_counted() -> None:
    assert "greedy answers: 3 of 40" in shown(80, COUNTING)


@pytest.mark.parametrize("when", ["within", "between"])
def test_a_terminal_that_is_gone_ends_nothing(when: str) -> None:
    here, there = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", OUTLIVES, when],
        env={**os.environ, "TERM": "xterm"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=there,
        text=True,
    )
    os.close(there)
    os.read(here, 1)
    os.close(here)
    assert process.communicate("it is gone\n", timeout=60) == ("done\n", None)
    assert process.returncode == 0
