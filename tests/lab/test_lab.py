"""The lab's hosts behave as separate machines, and nothing of them is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest
from lab_driver import SCRIPT, Lab, require_root

pytestmark = pytest.mark.lab

NAMESPACES = ("net", "pid", "ipc", "uts", "mnt")
TRACE = "LAB_TEST_TRACE"


def ssh(lab: Lab, host: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["ssh", "-F", str(lab.ssh_config), *options, host, "hostname"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def namespaces(pid: int | str) -> dict[str, str]:
    return {kind: str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in NAMESPACES}


def all_namespaces() -> set[str]:
    """Those that any process on the machine is in."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            found |= set(namespaces(entry.name).values())
        except OSError:
            continue
    return found


def processes_with(variable: str) -> list[int]:
    """Processes that have a variable, as NAME=VALUE, in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def kill_member(lab: Lab, member: str) -> None:
    for pid in processes_with(f"MTPPP_LAB={lab.name}/{member}"):
        # Those inside a host are gone with its init.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def remains(lab: Lab, trace: str = "") -> list[str]:
    """What there is of a lab on this machine. `trace`: what TRACE was when `up` was started."""
    links = json.loads(subprocess.check_output(["ip", "-json", "link", "show"]))
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    found = [link["ifname"] for link in links if lab.name in link.get("ifname", "")]
    found += [line for line in mounts if lab.name in line]
    found += [str(path) for path in Path("/var/lib/mtppp-lab").glob(lab.name)]
    found += [f"process {pid}" for pid in processes_with(f"{TRACE}={trace}") if trace]
    return found


def eventually(condition: Callable[[], bool], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def mended(lab: Lab) -> Iterator[Lab]:
    """The session's lab, for a test that breaks it."""
    yield lab
    lab.up()


class TestWithoutRoot:
    @pytest.mark.parametrize(
        ("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)]
    )
    def test_only_ci_insists(
        self, monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
    ) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setenv("CI", ci)
        with pytest.raises((pytest.fail.Exception, pytest.skip.Exception)) as caught:
            require_root()
        assert caught.type is outcome
        assert "the lab needs root" in str(caught.value)


class TestCommandLine:
    def test_help(self) -> None:
        done = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True)
        assert "Exit status" in done.stdout

    @pytest.mark.parametrize("arguments", [["up"], ["up", "0"], ["up", "1", "--name", "A"], []])
    def test_invalid_usage(self, arguments: list[str]) -> None:
        done = subprocess.run([SCRIPT, *arguments], capture_output=True, check=False)
        assert done.returncode == 2

    def test_a_missing_tool_is_named_with_its_package(self, spare_lab: Lab) -> None:
        done = spare_lab.do("up", "1", env={"PATH": "/nowhere"})
        assert done.returncode == 1
        assert "missing: " in done.stderr
        assert "ssh-keygen" in done.stderr
        assert re.search("apt-get install .*openssh-client", done.stderr)


class TestSsh:
    def test_every_host_answers_with_its_true_key(self, lab: Lab) -> None:
        for name in lab.hosts():
            done = ssh(lab, name)
            assert (done.returncode, done.stdout.strip()) == (0, name), done.stderr

    def test_a_wrong_host_key_is_refused(self, lab: Lab, tmp_path: Path) -> None:
        status = lab.status()
        key = Path(status["directory"], "n1", "host_key.pub").read_text()
        wrong = tmp_path / "known_hosts"
        wrong.write_text(f"{lab.hosts()['n2']['address']} {key}")
        done = ssh(lab, "n2", "-o", f"UserKnownHostsFile={wrong}")
        assert done.returncode == 255
        assert "Host key verification failed" in done.stderr

    def test_run_passes_arguments_output_and_status_on(self, lab: Lab) -> None:
        done = lab.run("n1", "sh", "-c", 'echo "$1"; echo err >&2; exit 7', "sh", "a  'b' $c")
        assert (done.returncode, done.stdout, done.stderr) == (7, "a  'b' $c\n", "err\n")

    def test_run_on_an_unknown_host_names_the_known_ones(self, lab: Lab) -> None:
        done = lab.run("n9", "true")
        assert done.returncode == 1
        assert "n9" in done.stderr
        assert "n1, n2, n3" in done.stderr

    def test_sessions_have_a_standard_path_whatever_bashrc_says(self, lab: Lab) -> None:
        path = lab.output("n1", "printenv", "PATH")
        assert path == "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

    def test_sftp(self, lab: Lab, tmp_path: Path) -> None:
        source = tmp_path / "file"
        source.write_text("content")
        subprocess.run(
            ["sftp", "-q", "-F", str(lab.ssh_config), "-b", "-", "n2"],
            input=f"put {source} /var/tmp/sent",
            text=True,
            timeout=30,
            check=True,
            capture_output=True,
        )
        assert lab.output("n2", "cat", "/var/tmp/sent") == "content"


class TestSeparation:
    def test_namespaces_differ(self, lab: Lab) -> None:
        seen = [namespaces("self")] + [namespaces(host["pid"]) for host in lab.hosts().values()]
        for kind in NAMESPACES:
            assert len({each[kind] for each in seen}) == len(seen), kind

    def test_processes_are_not_seen_elsewhere(self, lab: Lab) -> None:
        lab.output("n1", "sh", "-c", "setsid sleep 98765 >/dev/null 2>&1 </dev/null &")
        # The brackets keep the looking command from finding itself.
        look = "grep -la '9876[5]' /proc/[0-9]*/cmdline"
        assert lab.output("n1", "sh", "-c", look)
        assert lab.run("n2", "sh", "-c", look).stdout == ""

    def test_files_are_not_seen_elsewhere(self, lab: Lab) -> None:
        directories = ("/dev/shm", "/var/tmp", "/tmp", "/run", "/var/log")
        paths = [f"{directory}/{lab.name}-file" for directory in directories]
        lab.output("n1", "touch", *paths)
        assert lab.output("n1", "ls", *paths).split() == sorted(paths)
        assert lab.run("n2", "ls", *paths).stdout == ""
        assert [path for path in paths if Path(path).exists()] == []

    def test_shared_memory_is_a_file_system_in_memory(self, lab: Lab) -> None:
        assert lab.output("n1", "stat", "-f", "-c", "%T", "/dev/shm") == "tmpfs"

    def test_anyone_may_write_temporary_files(self, lab: Lab) -> None:
        modes = lab.output("n1", "stat", "-c", "%a", "/tmp", "/var/tmp", "/dev/shm").split()
        assert modes == ["1777"] * 3

    def test_network_devices_are_its_own(self, lab: Lab) -> None:
        assert lab.output("n1", "ls", "/sys/class/net").split() == ["eth0", "lo"]

    def test_the_checkout_is_seen_even_below_a_private_directory(self, lab: Lab) -> None:
        assert lab.run("n1", "test", "-x", str(SCRIPT)).returncode == 0

    def test_orphans_are_reaped(self, lab: Lab) -> None:
        lab.output("n1", "sh", "-c", "sleep 0.05 >/dev/null 2>&1 </dev/null &")
        zombies = "grep -h ') Z ' /proc/[0-9]*/stat"
        assert eventually(lambda: lab.run("n1", "sh", "-c", zombies).stdout == "")


class TestFabric:
    def test_names_resolve_to_fabric_addresses(self, lab: Lab) -> None:
        addresses = {name: host["address"] for name, host in lab.hosts().items()}
        for name, address in addresses.items():
            both = 'hostname -i; getent hosts "$@"'
            own, *table = lab.output(name, "sh", "-c", both, "sh", *addresses).splitlines()
            assert own == address
            assert {other: found for found, other in map(str.split, table)} == addresses

    def test_hosts_reach_each_other_and_themselves(self, lab: Lab) -> None:
        for name in lab.hosts():
            banners = "for to; do read -r line < /dev/tcp/$to/22 && echo $line; done"
            others = [*lab.hosts(), "localhost"]
            answers = lab.output(name, "timeout", "10", "bash", "-c", banners, "bash", *others)
            assert answers.count("SSH-2.0") == len(others)

    def test_part_loses_packets_between_two_and_up_restores(self, mended: Lab) -> None:
        def reaches(one: str, other: str) -> bool:
            address = mended.hosts()[other]["address"]
            script = f"exec 3<>/dev/tcp/{address}/22"
            return mended.run(one, "timeout", "1", "bash", "-c", script).returncode == 0

        mended.part("n1", "n2")
        mended.part("n3", "operator")
        assert [reaches("n1", "n2"), reaches("n2", "n1")] == [False, False]
        assert [reaches("n1", "n3"), reaches("n2", "n3")] == [True, True]
        assert ssh(mended, "n3", "-o", "ConnectTimeout=1").returncode == 255
        assert ssh(mended, "n2").returncode == 0
        mended.up()
        assert reaches("n1", "n2")
        assert ssh(mended, "n3").returncode == 0

    @pytest.mark.parametrize(
        ("one", "other"), [("n1", "n1"), ("operator", "operator"), ("n1", "n9")]
    )
    def test_part_of_what_cannot_be_parted(self, lab: Lab, one: str, other: str) -> None:
        done = lab.do("part", one, other)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr

    def test_cut_loses_packets_without_resets_and_heal_restores(self, mended: Lab) -> None:
        address = mended.hosts()["n2"]["address"]
        with subprocess.Popen(
            mended.argv("run", "n2", "--", "cat"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as session:
            assert session.stdin is not None
            assert session.stdout is not None
            session.stdin.write(b"before\n")
            session.stdin.flush()
            assert session.stdout.readline() == b"before\n"

            mended.cut("n2")
            assert mended.states() == {"n1": "up", "n2": "cut", "n3": "up"}
            session.stdin.write(b"during\n")
            session.stdin.flush()
            # Silence takes time to be told from an answer: 0.5 s each.
            assert select.select([session.stdout], [], [], 0.5)[0] == []
            with pytest.raises(TimeoutError):
                socket.create_connection((address, 22), timeout=0.5)
            connect = mended.run("n1", "timeout", "0.5", "bash", "-c", ": < /dev/tcp/n2/22")
            assert connect.returncode == 124

            mended.heal("n2")
            assert select.select([session.stdout], [], [], 20)[0], "the connection did not survive"
            assert session.stdout.readline() == b"during\n"
            session.stdin.close()
            assert session.wait(timeout=10) == 0
        mended.output("n1", "timeout", "5", "bash", "-c", ": < /dev/tcp/n2/22")
        assert set(mended.states().values()) == {"up"}


class TestLifeCycle:
    def test_up_again_changes_nothing(self, lab: Lab) -> None:
        before, files = lab.status(), snapshot(lab)
        lab.up()
        assert (lab.status(), snapshot(lab)) == (before, files)

    def test_a_killed_host_is_gone_at_once_and_comes_back(self, mended: Lab) -> None:
        for path in ("/var/tmp/kept", "/tmp/lost", "/dev/shm/lost"):
            mended.output("n3", "touch", path)
        others = {name: mended.hosts()[name]["pid"] for name in ("n1", "n2")}
        inside = namespaces(mended.hosts()["n3"]["pid"])
        mended.kill("n3")
        assert not set(inside.values()) & all_namespaces()
        assert mended.do("status").returncode == 1
        assert mended.states() == {"n1": "up", "n2": "up", "n3": "down"}
        mended.up()
        assert {name: mended.hosts()[name]["pid"] for name in ("n1", "n2")} == others
        left = mended.output("n3", "sh", "-c", "ls -d /var/tmp/* /tmp/lost /dev/shm/* 2>&-; true")
        assert left.split() == ["/var/tmp/kept"]

    def test_labs_live_side_by_side(self, lab: Lab, spare_lab: Lab) -> None:
        spare_lab.up(1)
        assert spare_lab.status()["subnet"] != lab.status()["subnet"]
        assert spare_lab.output("n1", "hostname") == "n1"
        spare_lab.down()
        assert set(lab.states().values()) == {"up"}
        assert lab.output("n1", "hostname") == "n1"

    def test_down_leaves_nothing(self, spare_lab: Lab) -> None:
        spare_lab.up(2)
        spare_lab.output("n1", "sh", "-c", "setsid sleep 98765 >/dev/null 2>&1 </dev/null &")
        hosts = spare_lab.hosts().values()
        inside = {each for host in hosts for each in namespaces(host["pid"]).values()}
        assert len(remains(spare_lab)) == 2  # what is looked for is found: link and directory
        assert inside <= all_namespaces()
        spare_lab.down()
        assert remains(spare_lab) == []
        assert not inside & all_namespaces()
        assert spare_lab.do("down").returncode == 0
        assert spare_lab.do("status").returncode == 1

    def test_fewer_hosts_can_be_asked_for(self, spare_lab: Lab) -> None:
        spare_lab.up(2)
        kept = spare_lab.hosts()["n1"]
        spare_lab.up(1)
        assert spare_lab.hosts() == {"n1": kept}

    def test_up_mends_a_lab_whose_switch_died(self, spare_lab: Lab) -> None:
        spare_lab.up(1)
        kill_member(spare_lab, "switch")
        spare_lab.up(1)
        assert spare_lab.output("n1", "hostname") == "n1"

    def test_a_busy_subnet_is_not_taken(self, lab: Lab, spare_lab: Lab) -> None:
        done = spare_lab.do("up", "1", "--subnet", lab.status()["subnet"])
        assert done.returncode == 1
        assert "--subnet" in done.stderr
        assert remains(spare_lab) == []


def snapshot(lab: Lab) -> dict[str, int]:
    """When each of the lab's own files was last written."""
    directory = Path(lab.status()["directory"])
    return {str(path): path.stat().st_mtime_ns for path in directory.glob("*") if path.is_file()}


TOOLS = ("ip", "nsenter", "ssh-keygen", "mount", "sshd")

# Stands in for a tool that `up` or a host's init calls. The chosen call waits to be let through;
# hosts start in parallel, so the first to see that many calls takes the place.
GATE = """\
#!/bin/sh
echo {tool} >> {directory}/calls
[ "$(grep -cx '{counted}' {directory}/calls)" -ge {nth} ] || exec {real} "$@"
set -o noclobber
true 2>&- > {directory}/reached || exec {real} "$@"
waited=0
until [ -e {directory}/passed ]; do
    [ $((waited += 1)) -lt 6000 ] || exit 1
    sleep 0.01
done
exec {real} "$@"
"""


class GatedUp:
    """`up 2`, which holds at the nth call of a tool, or of any, until let through."""

    def __init__(self, lab: Lab, directory: Path, nth: int, tool: str | None) -> None:
        self.directory = directory
        self.trace = str(directory)
        for name in TOOLS:
            real = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
            stand_in = directory / name
            stand_in.write_text(
                GATE.format(
                    tool=name, counted=tool or ".*", directory=directory, nth=nth, real=real
                )
            )
            stand_in.chmod(0o755)
        self.process = subprocess.Popen(
            # Shared: hosts' inits go on finding the stand-ins when they have their own /tmp.
            lab.argv("up", "2", "--share", str(directory)),
            env=os.environ | {TRACE: self.trace, "PATH": f"{directory}:{os.environ['PATH']}"},
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        reached = eventually((self.directory / "reached").exists, seconds=30)
        assert reached, f"only these calls: {(self.directory / 'calls').read_text().split()}"

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait(timeout=10) == -signal.SIGKILL

    def let_through(self) -> None:
        (self.directory / "passed").touch()

    def finish(self) -> tuple[int, str]:
        """Exit status and messages."""
        _, messages = self.process.communicate(timeout=60)
        return self.process.returncode, messages


class HoldUp(Protocol):
    def __call__(self, nth: int, tool: str | None = None) -> GatedUp: ...


@pytest.fixture
def hold_up(spare_lab: Lab, tmp_path: Path) -> Iterator[HoldUp]:
    """Starts `up` and holds it at the nth call; ends what the test leaves of it."""
    held: list[GatedUp] = []

    def hold(nth: int, tool: str | None = None) -> GatedUp:
        held.append(GatedUp(spare_lab, tmp_path, nth, tool))
        held[-1].wait()
        return held[-1]

    yield hold
    for up in held:
        up.let_through()
        up.process.kill()
        up.process.communicate()


class TestKilledHalfWay:
    # 1-3 look around, 4-6 make keys, 7 the switch, 8-16 cables, 17-48 the hosts' own set-up.
    @pytest.mark.parametrize("nth", [1, 4, 6, 7, 8, 9, 10, 15, 16, 18, 26, 34, 42, 46])
    def test_down_leaves_nothing(self, spare_lab: Lab, hold_up: HoldUp, nth: int) -> None:
        up = hold_up(nth)
        assert processes_with(f"{TRACE}={up.trace}")
        up.kill()
        up.let_through()
        spare_lab.down()
        assert remains(spare_lab, up.trace) == []

    def test_down_waits_for_what_is_on_its_way(self, spare_lab: Lab, hold_up: HoldUp) -> None:
        up = hold_up(8)
        up.kill()
        with subprocess.Popen(spare_lab.argv("down")) as down:
            # A `down` that does not wait is done in half this time.
            with pytest.raises(subprocess.TimeoutExpired):
                down.wait(timeout=1)
            up.let_through()
            assert down.wait(timeout=30) == 0
        assert remains(spare_lab, up.trace) == []

    @pytest.mark.parametrize("nth", [5, 9, 16, 44])
    def test_up_again_gives_a_whole_lab(self, spare_lab: Lab, hold_up: HoldUp, nth: int) -> None:
        up = hold_up(nth)
        up.kill()
        up.let_through()
        spare_lab.up(2)
        assert spare_lab.states() == {"n1": "up", "n2": "up"}
        assert spare_lab.output("n2", "bash", "-c", "read -r line < /dev/tcp/n1/22; echo $line")

    @pytest.mark.parametrize("member", ["switch", "n2"])
    def test_up_cleans_up_when_a_member_dies(
        self, spare_lab: Lab, hold_up: HoldUp, member: str
    ) -> None:
        up = hold_up(18)
        kill_member(spare_lab, member)
        up.let_through()
        status, messages = up.finish()
        assert status == 1
        assert "error: n" in messages
        assert remains(spare_lab, up.trace) == []

    def test_up_does_not_wait_for_hosts_whose_switch_died(
        self, spare_lab: Lab, hold_up: HoldUp
    ) -> None:
        up = hold_up(2, "sshd")  # the last host's, when all of the network is set up
        kill_member(spare_lab, "switch")
        up.let_through()
        status, messages = up.finish()
        assert status == 1
        assert "the lab's switch has ended" in messages
        assert remains(spare_lab, up.trace) == []

    def test_up_cleans_up_when_interrupted(self, spare_lab: Lab, hold_up: HoldUp) -> None:
        up = hold_up(18)
        up.process.send_signal(signal.SIGINT)
        up.let_through()
        assert up.finish()[0] == 130
        assert remains(spare_lab, up.trace) == []
