"""The lock of a deployment on a node: held by a live process, here and over ssh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from agents import kill, wait_for
from sshd_server import Relay, Sshd

from mtppp.errors import Locked, RemoteCommandFailed
from mtppp.hosts import ssh_connection
from mtppp.hosts.local import LocalTransport
from mtppp.hosts.lock import Holder, in_words
from mtppp.hosts.node import Node
from mtppp.hosts.ssh import Liveness, SshTransport

ROOT = Path(f"/var/tmp/mtppp-{os.getuid()}")
MakeNode = Callable[[], Node]


@pytest.fixture(params=["local", "ssh"])
def make_node(request: pytest.FixtureRequest, sshd: Sshd) -> Iterator[MakeNode]:
    """Nodes on this machine, each with a connection of its own."""
    made: list[Node] = []

    def make() -> Node:
        transport = LocalTransport("a") if request.param == "local" else SshTransport(sshd.target())
        made.append(Node(transport, sys.executable))
        return made[-1]

    yield make
    for node in made:
        node.unlock("the test ended")
        node.transport.close()


@pytest.fixture
def name(run_directory: str) -> str:
    """A deployment that is the test's own."""
    return run_directory.split("/")[-2]


def audit(deployment: str) -> list[tuple[str, str]]:
    """What and outcome of each line about a deployment."""
    lines = [json.loads(line) for line in (ROOT / "audit.log").read_text().splitlines()]
    return [(x["what"], x["outcome"]) for x in lines if x["deployment"] == deployment]


def holders(deployment: str) -> list[int]:
    """Processes that have a lock of a deployment open."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            for descriptor in (directory / "fd").iterdir():
                with suppress(OSError):  # closed meanwhile
                    path = descriptor.readlink()
                    if path.parent == ROOT / "locks" and path.name.startswith(f"{deployment}."):
                        found.append(int(directory.name))
    return found


def test_one_at_a_time(make_node: MakeNode, name: str) -> None:
    first, second = make_node(), make_node()
    holder = Holder.here("launch", name)
    first.lock(0, holder)
    with pytest.raises(Locked) as raised:
        second.lock(0, Holder.here("stop", name))
    said = raised.value
    assert said.message.startswith(f"{second.host}: {name} is being launched by {holder.who} since")
    assert said.message.endswith(" s")
    assert said.hint == "wait until that has ended, or end that process: its lock goes with it"
    second.lock(1, Holder.here("stop", name))  # another node of it, on the same machine
    first.unlock("done")
    second.unlock("failed:\nfor a reason")
    second.lock(0, Holder.here("stop", name))
    assert audit(name) == [
        ("launch", "begun"),
        ("stop", "begun"),
        ("launch", "done"),
        ("stop", "failed: for a reason"),
        ("stop", "begun"),
    ]


def test_what_is_asked_for_under_a_lock_is_carried_out(make_node: MakeNode, name: str) -> None:
    node = make_node()
    node.lock(0, Holder.here("launch", name))
    directory = f"{ROOT}/{name}/0"
    node.write(directory, [])
    assert node.uid() == os.getuid()
    node.unlock("done")
    node.unlock("done twice")
    assert audit(name)[-1] == ("launch", "done")


def test_a_lock_that_was_lost_is_taken_again(make_node: MakeNode, name: str) -> None:
    node = make_node()
    node.lock(0, Holder.here("launch", name))
    kill(*holders(name))
    wait_for(lambda: not holders(name), "the end of the holder")
    assert node.uid() == os.getuid()
    assert holders(name)
    assert audit(name) == [("launch", "begun")]


def test_a_lock_that_somebody_had_meanwhile_is_not(make_node: MakeNode, name: str) -> None:
    node, other = make_node(), make_node()
    node.lock(0, Holder.here("launch", name))
    kill(*holders(name))
    wait_for(lambda: not holders(name), "the end of the holder")
    other.lock(0, Holder.here("stop", name))
    other.unlock("done")
    with pytest.raises(Locked) as raised:
        node.write(f"{ROOT}/{name}/0", [])
    assert "the lock was lost with the connection, and since then" in raised.value.message
    assert "for 'stop'" in raised.value.message
    assert not (ROOT / name).exists()


def test_python_that_is_not_there_is_told(name: str) -> None:
    node = Node(LocalTransport("a"), "/no/python")
    with pytest.raises(RemoteCommandFailed, match=r"^a: there is no python at /no/python$"):
        node.lock(0, Holder.here("launch", name))


HOLD = """
import sys, time
from mtppp.hosts.local import LocalTransport
from mtppp.hosts.lock import Holder
from mtppp.hosts.node import Node
Node(LocalTransport("a"), sys.executable).lock(0, Holder.here("launch", sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_it_goes_with_its_owner(name: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", HOLD, name], stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        owner.kill()
    wait_for(lambda: not holders(name), "the end of the lock")
    wait_for(
        lambda: audit(name)[-1] == ("launch", "contact with who did it was lost"), "a last word"
    )


def test_it_goes_with_the_connection(start_sshd: Callable[..., Sshd], name: str) -> None:
    sshd = start_sshd()
    node = Node(SshTransport(sshd.target()), sys.executable)
    node.lock(0, Holder.here("launch", name))
    node.transport.close()
    wait_for(lambda: not holders(name), "the end of the lock")


@pytest.mark.slow
def test_a_holder_that_is_silent_is_given_up(
    sshd: Sshd, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the network is cut, or the owner is suspended: nothing tells the node."""
    source = Path(ssh_connection.__file__).with_name("agent.py").read_text()
    assert "SILENCE = 90.0\n" in source
    impatient = source.replace("SILENCE = 90.0\n", "SILENCE = 1.0\n")
    monkeypatch.setattr("mtppp.hosts.node._agent_source", lambda: impatient)
    monkeypatch.setattr(ssh_connection, "HELD_BEAT", 0.2)
    relay = Relay(sshd.port)
    known_hosts = sshd.directory / f"known_hosts.{relay.port}"
    known_hosts.write_text(sshd.known_line(name=f"[127.0.0.1]:{relay.port}"))
    target = sshd.target(port=relay.port, known_hosts=known_hosts)
    transport = SshTransport(target, liveness=Liveness(interval=0.1))
    node = Node(transport, sys.executable)
    node.lock(0, Holder.here("launch", name))
    # While it lives it is not given up, though nothing is asked for.
    assert not threading.Event().wait(2.0)
    assert holders(name)
    relay.cut = True
    wait_for(lambda: not holders(name), "the end of the lock")
    relay.stop()
    transport.close()


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (
            {"what": "launch", "seconds": 59, "deployment": "d", "who": "a@b (pid 1)"},
            "d is being launched by a@b (pid 1) since T, for 59 s",
        ),
        (
            {"what": "stop", "seconds": 200, "deployment": "d", "who": "a@b (pid 1)"},
            "d is being stopped by a@b (pid 1) since T, for 3 min",
        ),
        (
            {"what": "work", "seconds": 0, "who": "somebody"},
            "it is being worked on by somebody since T, for 0 s",
        ),
    ],
)
def test_who_holds_it_in_words(held: dict[str, Any], said: str) -> None:
    assert in_words({"since": "T", **held}) == said
