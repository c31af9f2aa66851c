"""What runs, what is ended and what is left alone: with real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agents import answer, ask, is_alive, kill, said, start, wait_for

# Dozens of real processes, started and ended one after the other.
pytestmark = pytest.mark.slow

SLEEP = "import time; time.sleep(600)"
FOREVER = "print('up'); import time; time.sleep(600)"
# Prints its children's numbers: one in its group, one in a session of its own, one whose parent
# has ended.
FAMILY = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.run([sys.executable, "-c",
    "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True)", *sleep])
print(subprocess.Popen(sleep).pid)
print(subprocess.Popen(sleep, start_new_session=True).pid)
print("up")
time.sleep(600)
"""
SHARED = """
import time
from multiprocessing import resource_tracker, shared_memory
segment = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")
print(segment.name)
print("up")
time.sleep(600)
"""

# A child, known by its mark alone, with so much memory that it takes a while to end.
LARGE = """
import os, time
if os.fork():
    time.sleep(600)
memory = bytearray(b"x") * (512 << 20)
print(os.getpid())
""" + SHARED.replace(
    "time.sleep", "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\ntime.sleep"
)


@pytest.fixture
def directory(run_directory: str) -> Iterator[str]:
    """A run directory; whatever runs for it is ended afterwards."""
    answer("write", directory=run_directory, files=[])
    yield run_directory
    processes = answer("processes", directory=run_directory)
    kill(*(process["pid"] for process in processes["marked"]))
    kill(*(entry["pid"] for entry in processes["recorded"] if entry["alive"]))


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts processes of somebody else; ended afterwards."""
    started: list[subprocess.Popen[str]] = []

    def spawn(script: str = SLEEP, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", script],
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield spawn
    for process in started:
        process.kill()
        process.communicate()


def up(directory: str, role: str = "test") -> list[int | str]:
    """Waits until a started script says that it is up; what it printed before that."""
    wait_for(lambda: "up" in said(directory, role), f"{role} is up")
    return [int(word) if word.isdigit() else word for word in said(directory, role)[:-1]]


def stop(directory: str, *segments: str, **grace: float) -> dict[str, object]:
    if segments:
        Path(directory, "segments.json").write_text(json.dumps(segments))
    stopped: dict[str, object] = answer(
        "stop", directory=directory, grace=grace, segments_file="segments.json"
    )
    return stopped


def test_a_started_process_outlives_the_agent_and_is_recorded(directory: str) -> None:
    entry = start(directory, FOREVER, role="ray")
    up(directory, "ray")
    assert is_alive(entry["pid"])
    assert os.getsid(entry["pid"]) == entry["pid"]
    ticks = int(Path(f"/proc/{entry['pid']}/stat").read_text().rpartition(")")[2].split()[19])
    assert entry == {
        "role": "ray",
        "pid": entry["pid"],
        "started": ticks,
        "log": f"{directory}/ray.log",
    }
    record = Path(directory, "processes.json")
    assert json.loads(record.read_text()) == [entry]
    assert record.stat().st_mode & 0o777 == 0o600
    assert answer("processes", directory=directory) == {
        "recorded": [{**entry, "alive": True}],
        "marked": [{"pid": entry["pid"], "command": f"{sys.executable} -u -c {FOREVER}"}],
        "shared_memory": [],
    }


def test_its_environment_is_the_planned_one_and_little_of_the_login(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.setenv("PATH", "/login")
    start(directory, "import os, json; print(json.dumps(dict(os.environ))); print('up')", PATH="/p")
    wait_for(lambda: "up" in said(directory), "the environment")
    text = Path(directory, "test.log").read_text()
    environment = json.loads(text.splitlines()[0])
    assert environment["PATH"] == "/p"
    assert environment["LANG"] == "C.UTF-8"
    assert environment["MTPPP_RUN_DIR"] == directory
    assert "VLLM_USE_V2_MODEL_RUNNER" not in environment


def test_it_makes_files_as_in_a_login_though_ours_are_private(directory: str) -> None:
    umask = os.umask(0o022)
    try:
        entry = start(
            directory, "open('made', 'w').close(); print('up'); import time; time.sleep(600)"
        )
    finally:
        os.umask(umask)
    up(directory)
    assert Path(directory, "made").stat().st_mode & 0o777 == 0o644
    assert Path(entry["log"]).stat().st_mode & 0o777 == 0o600


def test_the_log_before_is_kept(directory: str) -> None:
    for word in ("first", "second", "third"):
        start(directory, f"print('{word}'); print('up')")
        up(directory)
    assert Path(directory, "test.log").read_text() == "third\nup\n"
    assert Path(directory, "test.log.before").read_text() == "second\nup\n"


def test_a_program_that_is_not_there_is_named(directory: str) -> None:
    request = {"argv": ["/no/such/python"], "env": {}, "directory": directory}
    for whole in (
        ask("start", role="ray", log="ray.log", **request),
        ask("run", timeout=5, **request),
    ):
        assert whole == {"error": "[Errno 2] No such file or directory: '/no/such/python'"}


def test_stop_ends_all_descendants_and_nothing_else(
    directory: str, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    similar = spawn(MTPPP_RUN_DIR=directory + "0")
    foreign = spawn(FAMILY)
    assert foreign.stdout is not None
    theirs = [int(foreign.stdout.readline()) for _ in range(3)]
    try:
        entry = start(directory, FAMILY)
        ours = [entry["pid"], *up(directory)]
        marked = answer("processes", directory=directory)["marked"]
        assert sorted(process["pid"] for process in marked) == sorted(ours)

        stopped = stop(directory)
        assert stopped["running"] == 4
        assert len(stopped["killed"]) == 4
        assert stopped["left"] == []
        assert not any(is_alive(pid) for pid in ours)
        assert all(is_alive(pid) for pid in [similar.pid, foreign.pid, *theirs])
    finally:
        kill(*theirs)


def test_stop_again_finds_nothing(directory: str) -> None:
    start(directory, FOREVER)
    stop(directory)
    nothing = {"running": 0, "killed": [], "left": [], "unlinked": []}
    assert stop(directory) == nothing
    assert stop(directory + "/never/was") == nothing


GRACEFUL = """
import signal, sys, time
def end(*_):
    print("ended"); sys.exit()
signal.signal(signal.SIGTERM, end)
print("up")
time.sleep(600)
"""
STUBBORN = GRACEFUL.replace("end)", "signal.SIG_IGN)")


def test_only_a_role_with_grace_may_end_by_itself(directory: str) -> None:
    for role in ("ray", "server"):
        start(directory, GRACEFUL, role=role)
        up(directory, role)
    stopped = stop(directory, server=20)
    assert said(directory, "server") == ["up", "ended"]
    assert said(directory, "ray") == ["up"]
    assert len(stopped["killed"]) == 1


def test_a_process_that_ignores_sigterm_is_killed(directory: str) -> None:
    entry = start(directory, STUBBORN, role="server")
    up(directory, "server")
    stopped = stop(directory, server=0.05)
    assert not is_alive(entry["pid"])
    assert len(stopped["killed"]) == 1


def test_a_number_that_another_process_has_now_is_not_ours(
    directory: str, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    foreign = spawn()
    entry = start(directory, FOREVER)
    kill(entry["pid"])
    wait_for(lambda: not is_alive(entry["pid"]), "its end")
    record = Path(directory, "processes.json")
    # As if ours had ended and its number had been given out again since.
    record.write_text(json.dumps([{**entry, "role": "server", "pid": foreign.pid}]))
    assert answer("processes", directory=directory)["recorded"][0]["alive"] is False
    assert stop(directory, server=20)["killed"] == []
    assert foreign.poll() is None


def test_a_recorded_process_without_its_mark_is_ended(directory: str) -> None:
    # A process that retitles itself overwrites the environment that /proc shows.
    entry = answer(
        "start",
        role="ray",
        argv=[sys.executable, "-u", "-c", FOREVER],
        env={},
        directory=directory,
        log="ray.log",
    )
    up(directory, "ray")
    assert answer("processes", directory=directory)["marked"] == []
    assert stop(directory)["running"] == 1
    assert not is_alive(entry["pid"])


def test_a_damaged_record_does_not_keep_stop_from_ending_what_is_marked(directory: str) -> None:
    entry = start(directory, FOREVER)
    up(directory)
    Path(directory, "processes.json").write_text('[{"role": "ser')
    stop(directory)
    assert not is_alive(entry["pid"])


def test_shared_memory_goes_with_its_processes(
    directory: str, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    foreign = spawn(SHARED)
    assert foreign.stdout is not None
    theirs = Path("/dev/shm", foreign.stdout.readline().strip())
    try:
        start(directory, SHARED)
        [name] = up(directory)
        ours = f"/dev/shm/{name}"
        assert answer("processes", directory=directory)["shared_memory"] == [ours]
        assert stop(directory)["unlinked"] == [ours]
        assert not Path(ours).exists()
        assert theirs.exists()
    finally:
        theirs.unlink(missing_ok=True)


def test_what_takes_a_while_to_end_is_waited_for(directory: str) -> None:
    start(directory, LARGE)
    child, segment = up(directory)
    stopped = stop(directory)
    assert not is_alive(int(child))
    assert stopped["left"] == []
    assert stopped["unlinked"] == [f"/dev/shm/{segment}"]


def test_segments_of_processes_that_died_before(directory: str) -> None:
    entry = start(directory, SHARED)
    [name] = up(directory)
    segment = Path("/dev/shm", str(name))
    kill(entry["pid"])
    wait_for(lambda: not is_alive(entry["pid"]), "the end of a killed process")
    assert segment.exists()
    assert stop(directory, str(segment))["unlinked"] == [str(segment)]
    assert not segment.exists()


def test_a_segment_that_somebody_uses_stays(
    directory: str, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    foreign = spawn(SHARED)
    assert foreign.stdout is not None
    segment = Path("/dev/shm", foreign.stdout.readline().strip())
    try:
        assert stop(directory, str(segment))["unlinked"] == []
        assert segment.exists()
    finally:
        segment.unlink()


def test_what_a_process_without_a_command_line_has_open_is_removed(directory: str) -> None:
    """So does one look that is ending, for as long as the kernel takes to clear its memory."""
    ending = subprocess.Popen(
        [""], executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with ending:
        assert ending.stdin is not None
        assert ending.stdout is not None
        ending.stdin.write(SHARED.replace('"up"', '"up", flush=True'))
        ending.stdin.close()
        segment = f"/dev/shm/{ending.stdout.readline().strip()}"
        assert ending.stdout.readline() == "up\n"
        stopped = stop(directory, segment)
        ending.kill()
    assert stopped["unlinked"] == [segment]


def test_only_shared_memory_is_unlinked(directory: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.touch()
    named = [str(precious), f"/dev/shm/..{precious}", f"/dev/shm/../..{precious}"]
    assert stop(directory, *named)["unlinked"] == []
    assert precious.exists()


@pytest.mark.parametrize("text", ["", '["/dev/shm/', "{}"])
def test_a_list_of_segments_that_was_cut_off_is_none(directory: str, text: str) -> None:
    Path(directory, "segments.json").write_text(text)
    assert stop(directory)["unlinked"] == []


def test_run_to_the_end(directory: str) -> None:
    script = (
        "import os, sys; print(os.getcwd(), os.environ['A']);"
        "print('e', file=sys.stderr); sys.exit(3)"
    )
    ran = answer(
        "run",
        argv=[sys.executable, "-c", script],
        env={"A": "b"},
        directory=directory,
        timeout=30,
    )
    assert ran == {"status": 3, "stdout": f"{directory} b\n", "stderr": "e\n"}


def test_run_gives_up_and_kills_what_it_started(directory: str) -> None:
    # The child has the pipes, too: waiting for their end would take ten minutes.
    script = (
        "import subprocess, sys, time;"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid,"
        " flush=True); time.sleep(600)"
    )
    ran = answer(
        "run", argv=[sys.executable, "-c", script], env={}, directory=directory, timeout=1.5
    )
    assert ran["status"] is None
    assert ran["stderr"] == ""
    child = int(ran["stdout"])
    wait_for(lambda: not is_alive(child), "the end of the child")
