"""The agent, run as a node runs it: its source and one request on standard input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

AGENT = Path(__file__).parents[3] / "launcher" / "mtppp" / "hosts" / "agent.py"
START = "import sys; exec(compile(eval(sys.stdin.readline()), 'agent', 'exec'))"


# The same for several requests, as another user. Its modules are imported before: that user may
# not be allowed to read them.
START_AS = """
import ast, io, json, os, sys
request = json.load(sys.stdin)
tree = ast.parse(request["source"])
exec(compile(ast.Module([n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))], []),
     "imports", "exec"))
if request["uid"] != os.getuid():
    os.setgroups([]); os.setgid(request["uid"]); os.setuid(request["uid"])
for asked in request["requests"]:
    sys.stdin = io.StringIO(json.dumps(asked))
    exec(compile(request["source"], "agent", "exec"), {})
"""


def ask(op: str, **request: Any) -> dict[str, Any]:
    """The whole answer to a request, `{"answer": ...}` or `{"error": ...}`."""
    stdin = f"{AGENT.read_text()!a}\n{json.dumps({'op': op, **request})}"
    [whole] = _answers(START, stdin)
    return whole


def ask_all(requests: Sequence[dict[str, Any]], *, uid: int) -> list[dict[str, Any]]:
    """The whole answers to several requests, made as user `uid`."""
    request = {"source": AGENT.read_text(), "uid": uid, "requests": requests}
    return _answers(START_AS, json.dumps(request))


def _answers(script: str, stdin: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-I", "-c", script],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def answer(op: str, **request: Any) -> Any:
    """The answer to a request that is carried out."""
    whole = ask(op, **request)
    assert "error" not in whole, whole
    return whole["answer"]


def start(directory: str, script: str, *, role: str = "test", **env: str) -> dict[str, Any]:
    """Start a python script as the agent starts long-lived processes; the entry recorded."""
    entry: dict[str, Any] = answer(
        "start",
        role=role,
        argv=[sys.executable, "-u", "-c", script],
        env={"MTPPP_RUN_DIR": directory, **env},
        directory=directory,
        log=f"{role}.log",
    )
    return entry


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """What `condition` gives, as soon as it is true."""
    deadline = time.monotonic() + 30
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.005)
    return value


def said(directory: str, role: str = "test") -> list[str]:
    """The whole lines that a started script has printed."""
    text = Path(directory, f"{role}.log").read_text()
    return text[: text.rfind("\n") + 1].split()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def kill(*pids: int) -> None:
    for pid in pids:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
