"""Managed environments, really made on this machine, of tiny wheels."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from wheels import build_wheel, lock_text

from mtppp.cluster import load
from mtppp.console import Step
from mtppp.errors import ConfigurationError, MtpppError
from mtppp.hosts.local import LocalTransport
from mtppp.hosts.node import Node
from mtppp.phases.deployment import Deployment
from mtppp.phases.environment import MakeEnvironment, use_environment
from mtppp.runtime.lock import parse_lock
from mtppp.runtime.runtime import runtime_of

# Each makes a virtual environment or two, seconds of work on an idle machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(f"/var/tmp/mtppp-{os.getuid()}")


@pytest.fixture
def wheelhouse(tmp_path: Path) -> Path:
    directory = tmp_path / "wheels"
    directory.mkdir()
    return directory


@pytest.fixture
def managed(
    tmp_path: Path, wheelhouse: Path, run_directory: str
) -> Iterator[Callable[..., Deployment]]:
    """A deployment of local nodes with an environment that is made of a lock."""
    locks: list[str] = []
    name = run_directory.split("/")[-2]

    def make(lock: str, hosts: str = "a", **runtime: str) -> Deployment:
        locks.append(lock)
        (tmp_path / "lock.txt").write_text(lock)
        nodes = [
            {"host": host, "address": f"127.0.0.{i}", "transport": "local", "gpus": 1}
            for i, host in enumerate(hosts, 1)
        ]
        content = {
            "name": name,
            "model": {"id": "org/model"},
            "nodes": nodes,
            "runtime": {
                "vllm": "0.32.0",
                "environment": "managed",
                "python": sys.executable,
                "lock": "lock.txt",
                "wheelhouse": str(wheelhouse),
            }
            | runtime,
        }
        file = tmp_path / "cluster.yaml"
        file.write_text(yaml.safe_dump(content))
        cluster = load(file).cluster
        python = cluster.runtime.python
        connected = [Node(LocalTransport(host), python) for host in hosts]
        return Deployment(cluster=cluster, file=file, nodes=connected)

    yield make
    for lock in locks:
        for path in (ROOT / "envs").glob(parse_lock(lock, "lock").digest + "*"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def small(wheelhouse: Path) -> str:
    """A lock that says of itself that it has vLLM and Ray."""
    return lock_text(
        {
            f"{name}=={version}": build_wheel(wheelhouse, name, version)
            for name, version in (("vllm", "0.32.0"), ("ray", "2.60.0"), ("b", "1"))
        }
    )


def environment_of(deployment: Deployment) -> Path:
    lock = runtime_of(deployment.cluster).lock
    assert lock is not None
    return ROOT / "envs" / lock.digest


def remains(deployment: Deployment) -> list[str]:
    """What lies beside the environment, but for the file by which makers exclude each other."""
    link = environment_of(deployment)
    return sorted(p.name for p in link.parent.glob(f"{link.name}*") if p.suffix != ".lock")


def test_one_is_made_once_used_again_and_not_when_changed(
    managed: Callable[..., Deployment], wheelhouse: Path, step: Step
) -> None:
    deployment = managed(small(wheelhouse), "ab")
    link = environment_of(deployment)
    link.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # What a maker left that was killed.
    Path(f"{link}.killed").mkdir()
    Path(f"{link}.new").symlink_to("nowhere")
    assert use_environment(deployment) == ["a", "b"]
    # Both nodes are this machine: two makers at once, of which one waits for the other.
    MakeEnvironment().run(deployment, step)
    assert step.note.endswith("3 distributions, made on a, b")
    assert link.is_symlink()
    assert remains(deployment) == sorted([link.name, link.readlink().name])

    facts = deployment.nodes[1].facts(address="127.0.0.2", model_path=None, ports=[])
    assert facts.python == f"{link}/bin/python"
    assert facts.versions == {"vllm": "0.32.0", "ray": "2.60.0", "torch": None}

    made = link.readlink()
    again = managed((wheelhouse.parent / "lock.txt").read_text())
    MakeEnvironment().run(again, step)
    assert step.note.endswith("3 distributions")
    assert link.readlink() == made
    assert again.nodes[0].python == f"{link}/bin/python"
    assert use_environment(managed((wheelhouse.parent / "lock.txt").read_text())) == []

    [site] = link.glob("lib/python3*/site-packages")
    shutil.rmtree(site / "b-1.dist-info")
    changed = managed((wheelhouse.parent / "lock.txt").read_text())
    with pytest.raises(MtpppError, match="was changed since it was made: b") as caught:
        MakeEnvironment().run(changed, step)
    assert f"rm -r {link}" in caught.value.hint


def test_a_wheel_that_is_another_file_is_not_installed(
    managed: Callable[..., Deployment], wheelhouse: Path, step: Step
) -> None:
    deployment = managed(small(wheelhouse))
    build_wheel(wheelhouse, "b", "1", content="somebody = 'else'")
    with pytest.raises(MtpppError, match=r"b==1 is another file than the lock was made") as caught:
        MakeEnvironment().run(deployment, step)
    assert "do not use it" in caught.value.hint
    assert caught.value.message.startswith("a: ")
    assert remains(deployment) == []


def test_a_wheelhouse_that_lacks_a_wheel(
    managed: Callable[..., Deployment], wheelhouse: Path, step: Step
) -> None:
    deployment = managed(small(wheelhouse))
    (wheelhouse / "b-1-py3-none-any.whl").unlink()
    with pytest.raises(MtpppError, match=r"has no b==1 for this Python") as caught:
        MakeEnvironment().run(deployment, step)
    assert "pip download --no-deps --require-hashes" in caught.value.hint


def test_what_is_known_before_anything_is_installed(
    managed: Callable[..., Deployment], wheelhouse: Path, step: Step
) -> None:
    text = small(wheelhouse)
    large = managed(text.replace("# bytes: 1000", "# bytes: 999000111000111"))
    with pytest.raises(MtpppError, match=r"a: no environment could be made: .* GiB free") as caught:
        MakeEnvironment().run(large, step)
    assert "free some space" in caught.value.hint
    assert remains(large) == []
    elsewhere = managed(text, wheelhouse="/nonexistent")
    with pytest.raises(MtpppError, match=r"there is no directory /nonexistent"):
        MakeEnvironment().run(elsewhere, step)
    unfit = managed(lock_text({"vllm==0.32.0": "a" * 64}, pythons="2.7"))
    with pytest.raises(MtpppError, match=r"is Python 3\.\d+\.\d+; the lock has wheels for 2\.7"):
        MakeEnvironment().run(unfit, step)
    other = managed(lock_text({"vllm==0.31.0": "a" * 64}))
    with pytest.raises(ConfigurationError, match=r"has vLLM 0\.31\.0; runtime\.vllm asks for 0\.3"):
        MakeEnvironment().run(other, step)


class Interrupted(Step):
    """A person who loses patience at once."""

    def progress(self, text: str) -> None:
        raise KeyboardInterrupt


def test_an_interrupted_launch_ends_what_it_started(
    managed: Callable[..., Deployment], wheelhouse: Path, step: Step, run_directory: str
) -> None:
    deployment = managed(small(wheelhouse), "ab")
    phase = MakeEnvironment()
    with pytest.raises(KeyboardInterrupt):
        phase.run(deployment, Interrupted(step._console, "environment"))
    directories = [f"{run_directory[:-1]}{index}/environment" for index in (0, 1)]
    running = [
        node.processes(directory)["marked"]
        for node, directory in zip(deployment.nodes, directories, strict=True)
    ]
    assert all(running)
    phase.clean_up(deployment)
    for node, directory in zip(deployment.nodes, directories, strict=True):
        assert node.processes(directory)["marked"] == []
    assert environment_of(deployment).name not in remains(deployment)


def test_a_python_that_is_there_is_left_as_it_is(
    deploy: Callable[..., Deployment], step: Step
) -> None:
    deployment = deploy()
    before = [node.python for node in deployment.nodes]
    MakeEnvironment().run(deployment, step)
    assert [node.python for node in deployment.nodes] == before
    assert step.note.endswith("as it is there")
