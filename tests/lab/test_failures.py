"""What goes wrong before vLLM is started: message, hint, exit status, and nothing left."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deployments import COMMAND, MODELS, cluster_file, mtppp
from lab_driver import Lab

from mtppp.hosts.lock import Holder
from mtppp.hosts.node import Node
from mtppp.hosts.ssh import SshTarget, SshTransport

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

NAME = "fails"
HOSTS = ("n1", "n2")


@dataclass(frozen=True)
class Site:
    """The lab, and the file of a deployment there."""

    lab: Lab
    directory: Path
    python: Path

    def file(self, **changes: Any) -> str:
        """A cluster file with these top-level keys changed."""
        keys = {"name": NAME, "python": self.python} | changes
        path = cluster_file(self.directory, self.lab, hosts=HOSTS, model="demo-glm4-moe", **keys)
        return str(path)

    def ssh(self, **changes: Any) -> dict[str, Any]:
        return {"config_file": str(self.lab.ssh_config), **changes}

    def remains(self) -> str:
        """Processes that bear our mark, and files of the deployment."""
        look = (
            "grep -lz ^MTPPP_RUN_DIR= /proc/[0-9]*/environ 2>/dev/null;"
            f" ls -d /var/tmp/mtppp-0/{NAME} 2>/dev/null; true"
        )
        return "".join(self.lab.output(host, "sh", "-c", look) for host in HOSTS)


@pytest.fixture
def site(lab: Lab, tmp_path: Path, vllm_python: Callable[[str], Path]) -> Iterator[Site]:
    site = Site(lab, tmp_path, vllm_python("0.32.0"))
    yield site
    lab.up()  # what was cut is healed
    for host in HOSTS:
        lab.output(host, "rm", "-rf", f"/var/tmp/mtppp-0/{NAME}", "/var/tmp/only-here")


def told(site: Site, file: str) -> tuple[int, str, str]:
    """Exit status, message and hint of a launch that fails and leaves nothing."""
    failed = mtppp("launch", file)
    assert site.remains() == ""
    lines = failed.stderr.splitlines()
    [error] = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    hints = [line.removeprefix("hint: ") for line in lines if line.startswith("hint: ")]
    return failed.returncode, error, "".join(hints)


def test_a_key_that_no_host_takes(site: Site) -> None:
    key = site.directory / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    config = site.directory / "config"
    kept = [
        line
        for line in site.lab.ssh_config.read_text().splitlines()
        if "identityfile" not in line.lower()
    ]
    config.write_text("\n".join(kept) + "\n")
    file = site.file(ssh={"config_file": str(config), "identity_file": str(key)})
    status, error, hint = told(site, file)
    assert status == 1
    assert error.startswith("n1: ")
    assert "authentication refused for user 'root'" in error
    assert "authorized_keys" in hint


def test_a_host_key_that_is_not_known(site: Site) -> None:
    empty = site.directory / "known_hosts"
    empty.touch()
    status, error, hint = told(site, site.file(ssh=site.ssh(known_hosts=str(empty))))
    assert status == 1
    assert "unknown host key" in error
    assert "Compare the fingerprint" in hint


def test_a_host_that_is_down(site: Site) -> None:
    site.lab.cut("n2")
    failed = mtppp("launch", site.file(ssh=site.ssh(connect_timeout=2)))
    site.lab.heal("n2")
    assert failed.returncode == 1
    assert "error: n2: " in failed.stderr
    assert "no answer within 2 s" in failed.stderr
    assert "hint: Is the host up, and does a firewall let the port through?" in failed.stderr
    assert site.remains() == ""


@contextmanager
def listening(lab: Lab, host: str, python: Path, address: str, port: int) -> Iterator[None]:
    script = f"import socket,time; s=socket.create_server(('{address}',{port})); time.sleep(600)"
    start = f'setsid {python} -c "{script}" >/dev/null 2>&1 </dev/null & echo $!'
    pid = lab.output(host, "sh", "-c", start)
    wait = f"until ss -Hltn | grep -q {address}:{port}; do sleep 0.05; done"
    lab.output(host, "sh", "-c", wait)
    try:
        yield
    finally:
        lab.output(host, "kill", pid)


def test_a_port_that_is_taken(site: Site) -> None:
    address = site.lab.hosts()["n1"]["address"]
    with listening(site.lab, "n1", site.python, address, 8000):
        status, error, hint = told(site, site.file())
    assert status == 1
    assert error.startswith("n1: port 8000 is taken (pid ")
    assert error.endswith("set serve.port to a free one")
    assert hint.startswith("nothing was started")


def test_a_model_that_the_last_host_does_not_have(site: Site) -> None:
    model = "/var/tmp/only-here"
    for host, copies in (("n1", True), ("n2", False)):
        command = f"cp -r {MODELS}/demo-glm4-moe {model}" if copies else f"rm -rf {model}"
        site.lab.output(host, "sh", "-c", command)
    file = Path(site.file())
    file.write_text(file.read_text().replace(f"{MODELS}/demo-glm4-moe", model))
    status, error, hint = told(site, str(file))
    assert (status, error) == (
        1,
        f"n2: no model is at {model}: there is no config.json that root may read; copy it there, or"
        " set model.id to a path that every node has",
    )
    assert hint.startswith("nothing was started")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"python": Path("/usr/bin/python3")}, "has no vLLM; runtime.vllm asks for 0.32.0"),
        ({"release": "0.31.0"}, "has vLLM 0.32.0; runtime.vllm asks for 0.31.0"),
        ({"python": Path("/no/python")}, "there is no python at /no/python"),
    ],
)
def test_vllm_that_is_not_there_or_another(site: Site, changes: dict[str, Any], said: str) -> None:
    failed = mtppp(
        "launch", site.file(at_own_risk=["unlisted_family", "unproven_decode"], **changes)
    )
    assert failed.returncode == 1
    assert said in failed.stderr
    assert "\nhint: " in failed.stderr
    assert site.remains() == ""


# ---- two at once, and interruptions ----------------------------------------------------------


@pytest.fixture
def somebody(site: Site) -> Iterator[Callable[[str], str]]:
    """Has somebody else launch the deployment, on one host; who that is."""
    with ExitStack() as stack:

        def works(host: str) -> str:
            target = SshTarget(host=host, config_file=site.lab.ssh_config)
            node = Node(SshTransport(target), str(site.python))
            holder = Holder.here("launch", NAME)
            stack.callback(node.transport.close)
            node.lock(HOSTS.index(host), holder)
            return holder.who

        yield works


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("command", ["launch", "stop"])
def test_who_comes_second_is_told(
    site: Site, somebody: Callable[[str], str], host: str, command: str
) -> None:
    who = somebody(host)
    failed = mtppp(command, site.file())
    assert failed.returncode == 1
    assert f"error: {host}: {NAME} is being launched by {who} since 20" in failed.stderr
    assert "hint: wait until that has ended, or end that process" in failed.stderr
    assert site.remains() == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_operator_who_goes_early_leaves_nothing(site: Site, number: signal.Signals) -> None:
    launch = subprocess.Popen([*COMMAND, "launch", site.file()], stderr=subprocess.PIPE, text=True)
    with launch:
        assert launch.stderr is not None
        for line in launch.stderr:
            if "✓ lock" in line:
                break
        launch.send_signal(number)
        _, said = launch.communicate(timeout=120)
    if number != signal.SIGKILL:
        assert launch.returncode == 130
        assert said.endswith("interrupted\n")
    assert site.remains() == ""
    # The lock went with it: who comes next is not kept.
    stopped = mtppp("stop", site.file())
    assert stopped.returncode == 0, stopped.stderr
    assert f"{NAME} was not running" in stopped.stderr
