"""Requests of others are held until a launch has verified what serves: with a real gate."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gated
import pytest
from click.testing import CliRunner

from mtppp.cli import status as status_command
from mtppp.cli.open import command as open_command
from mtppp.cli.verify_servers import server_of
from mtppp.console import Console, Step
from mtppp.engine.client import EngineClient
from mtppp.errors import MtpppError
from mtppp.model.config import find_config
from mtppp.phases.deployment import Deployment
from mtppp.phases.gate import held, lets_in, look, open_gate
from mtppp.phases.identity import identity
from mtppp.phases.open import OpenByHand
from mtppp.phases.phase import run_phases
from mtppp.phases.ray_cluster import StartRay
from mtppp.phases.reach import reachable_from_here
from mtppp.phases.running import CompareWithRunning
from mtppp.phases.ship import ShipPlugins
from mtppp.phases.status import ask
from mtppp.phases.verify import SelfScore, known_of
from mtppp.verify.prompts import brief_set
from mtppp.verify.run import Settings
from mtppp.verify.session import verify
from mtppp.verify.tiers import GLANCE
from mtppp_patches import gate as gate_module

sys.path.insert(0, str(Path(__file__).parents[1] / "verify"))

from replay import Recorded, Replay

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ATTESTED = Path(__file__).parents[2] / "data/vllm-0.29.0-attested.json"
"""What both ranks of a launch on two nodes of this machine wrote, without their variables."""


@pytest.fixture
def start(free_port: int) -> Iterator[Callable[..., None]]:
    """Start the server of a deployment, and Ray's stand-ins; another one if one runs.

    It answers what the server at a URL does, if one is given.
    """
    started: list[subprocess.Popen[bytes]] = []

    def begin(deployment: Deployment, *upstream: str) -> None:
        for process in started:
            process.kill()
            process.wait()
        started.clear()
        for planned in deployment.plan.nodes:
            directory = planned.directory
            env = {
                "MTPPP_RUN_DIR": directory,
                "PYTHONPATH": str(Path(gate_module.__file__).parents[1]),
            }
            commands = {"ray": ["sleep", "600"]}
            if planned.index == 0:
                commands["server"] = [sys.executable, gated.__file__, str(free_port), *upstream]
            entries = []
            for role, argv in commands.items():
                process = subprocess.Popen(argv, env=env, start_new_session=True)
                started.append(process)
                ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
                entries.append(
                    {"role": role, "pid": process.pid, "started": int(ticks), "log": "l"}
                )
            Path(directory, "processes.json").write_text(json.dumps(entries))
        with EngineClient(deployment.plan.endpoint) as client:
            while not client.healthy():
                time.sleep(0.01)

    yield begin
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def launch(
    deploy: Callable[..., Deployment], start: Callable[..., None], step: Step
) -> Callable[..., Deployment]:
    """A deployment before it is verified, but for the ranks' records: its gate is closed."""

    def make(*upstream: str, **changes: Any) -> Deployment:
        deployment = deploy(ray={"base_port": 10000 + 200 * (os.getpid() % 80)}, **changes)
        ShipPlugins().run(deployment, step)
        Path(deployment.plan.head.directory, "checked.json").write_text('{"by": "ann", "at": "T"}')
        start(deployment, *upstream)
        return deployment

    return make


@pytest.fixture
def launched(launch: Callable[..., Deployment]) -> Deployment:
    return launch()


def from_another_machine(deployment: Deployment) -> Deployment:
    """The same, to somebody who knows what the nodes tell and nothing else."""
    return replace(deployment, gate_key="", adopted=False, finished=False)


def test_until_it_is_verified_others_are_held_and_a_launch_goes_on(
    launched: Deployment, step: Step
) -> None:
    endpoint = launched.plan.endpoint
    assert not lets_in(launched, endpoint)
    other = from_another_machine(launched)
    status = ask(other)
    assert (status.state, status.gate, status.gate_why) == ("gated", "closed", "")
    assert status.explanation.startswith("a token came; others get 503")
    assert status_command.exit_status(status) == 1
    # There it is, though it says 503: no way has to be forwarded.
    assert reachable_from_here(endpoint, launched.plan.served_name)
    CompareWithRunning().run(other, step)
    assert (other.adopted, other.finished) == (True, False)


def test_a_server_without_the_gate_is_noticed(launched: Deployment) -> None:
    endpoint = launched.plan.endpoint
    assert held(launched, endpoint).opened is None
    open_gate(launched, look(launched), endpoint, "PASS")
    Path(launched.plan.head.directory, gate_module.OPEN_FILE).unlink()
    with pytest.raises(MtpppError, match="lets everybody in, although nothing has opened it"):
        held(launched, endpoint)


def test_it_is_opened_for_the_server_that_was_verified(launched: Deployment, step: Step) -> None:
    open_gate(launched, look(launched), launched.plan.endpoint, "PASS of the smoke tier")
    assert lets_in(launched, launched.plan.endpoint)
    other = from_another_machine(launched)
    status = ask(other)
    assert (status.state, status.gate) == ("serving", "open")
    assert status.gate_why.startswith("PASS of the smoke tier (")
    CompareWithRunning().run(other, step)
    assert other.finished
    assert "open: PASS of the smoke tier" in step.note


def test_a_server_that_was_restarted_meanwhile_stays_closed(
    launched: Deployment, start: Callable[[Deployment], None]
) -> None:
    verified = look(launched)
    start(launched)
    with pytest.raises(MtpppError, match="another server runs there than was looked at"):
        open_gate(launched, verified, launched.plan.endpoint, "PASS")
    assert ask(from_another_machine(launched)).state == "gated"


def test_an_earlier_launch_opens_nothing_for_the_next(
    launched: Deployment, start: Callable[[Deployment], None], step: Step
) -> None:
    open_gate(launched, look(launched), launched.plan.endpoint, "PASS")
    before = launched.gate_key
    directory = Path(launched.plan.head.directory)
    left = (directory / gate_module.OPEN_FILE).read_text()
    ShipPlugins().run(launched, step)
    assert not (directory / gate_module.OPEN_FILE).exists()
    assert launched.gate_key != before
    (directory / gate_module.OPEN_FILE).write_text(left)  # as if it could not be removed
    start(launched)
    assert not lets_in(launched, launched.plan.endpoint)
    launched.gate_key = before
    with launched.engine(launched.plan.endpoint) as client, pytest.raises(MtpppError, match="503"):
        client.models()


def test_opened_by_hand_it_says_so(launched: Deployment) -> None:
    run_phases([OpenByHand()], launched, Console())
    status = ask(from_another_machine(launched))
    assert status.state == "serving"
    assert status.gate_why.startswith("by hand, at your own risk (")
    step = Step(Console(), "open")
    OpenByHand().run(launched, step)
    assert step.note.startswith("it is open: by hand")


def third_random(_: Recorded, tokens: list[int], chance: random.Random) -> list[int]:
    return [chance.randrange(512) if i % 3 == 2 else token for i, token in enumerate(tokens)]


@pytest.fixture
def replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replay]:
    """What the gate is before: recorded answers of a real server."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server = Replay()
    server.model = "demo"
    yield server
    server.stop()


def concluded(deployment: Deployment, **section: str) -> tuple[int, str]:
    """Exit status of a launch that goes on with this deployment, and what `status` says then.

    Args:
        section: the key `verify` of its file.
    """
    verify = deployment.cluster.verify.model_copy(update=section)
    deployment.cluster = deployment.cluster.model_copy(update={"verify": verify})
    deployment.adopted = True
    try:
        run_phases([StartRay(), SelfScore()], deployment, Console())
        exit_status = deployment.exit_status
    except MtpppError as error:
        exit_status = error.exit_status
    status = ask(from_another_machine(deployment))
    if status.state != "stopped":
        assert lets_in(deployment, deployment.plan.endpoint) is (status.gate == "open")
    return exit_status, status.state


def test_the_file_says_what_becomes_of_a_server_that_is_no_pass(
    replay: Replay, launch: Callable[..., Deployment]
) -> None:
    deployment = launch(replay.url)
    replay.tokenizer = False
    assert concluded(deployment) == (3, "gated")
    replay.tokenizer, replay.fault = True, third_random
    assert concluded(deployment, on_fail="keep-gated") == (1, "gated")
    assert concluded(deployment, on_fail="stop") == (1, "stopped")


@pytest.mark.parametrize(
    ("fault", "section", "exit_status"),
    [(None, "on_inconclusive", 3), (third_random, "on_fail", 1)],
    ids=["no verdict", "fail"],
)
def test_the_file_may_have_it_served_all_the_same(
    replay: Replay, launch: Callable[..., Deployment], fault: Any, section: str, exit_status: int
) -> None:
    deployment = launch(replay.url)
    replay.fault, replay.tokenizer = fault, bool(fault)
    assert concluded(deployment, **{section: "keep"}) == (exit_status, "serving")
    why = ask(from_another_machine(deployment)).gate_why
    assert f"at your own risk as verify.{section} says" in why


def test_nothing_is_opened_by_hand_without_saying_at_whose_risk(tmp_path: Path) -> None:
    file = Path("cluster_configs/local-demo.yaml").absolute()
    done = CliRunner().invoke(open_command, [str(file)])
    assert done.exception is not None
    assert "nothing was opened" in str(done.exception)
    assert "--at-own-risk" in str(getattr(done.exception, "hint", ""))


def test_a_report_names_weights_configuration_and_command(
    launched: Deployment, demo_directory: Path
) -> None:
    model = launched.cluster.model.model_copy(update={"id": str(demo_directory)})
    launched.cluster = launched.cluster.model_copy(update={"model": model})
    about = identity(launched)
    assert re.fullmatch(r"[0-9a-f]{12} \(1 files, below 1 GiB\)", about["weights"])
    assert about["config"] == find_config(str(demo_directory)).digest[:12]
    assert about["argv"] == shlex.join(launched.plan.server.argv)


@pytest.mark.parametrize("risk", [(), ("unlisted_family", "unproven_patch")])
def test_a_report_says_what_goes_ahead_at_ones_own_risk(
    launched: Deployment, monkeypatch: pytest.MonkeyPatch, risk: tuple[str, ...]
) -> None:
    """That of `mtppp verify`, which asks the nodes, and that of a launch."""
    status = replace(ask(launched), at_own_risk=risk)
    monkeypatch.setattr("mtppp.cli.verify_servers.ask", lambda _: status)
    assert launched.reviewed is not None
    plan = replace(launched.plan, at_own_risk=risk)
    launched.reviewed = replace(launched.reviewed, plan=plan)
    for about in (server_of(launched, "candidate")[1], known_of(launched)["candidate"]):
        assert about.get("at own risk", "") == " ".join(risk)


def test_a_report_has_the_patches_and_the_evidence_that_ranks_attest(
    replay: Replay, launch: Callable[..., Deployment], tmp_path: Path
) -> None:
    """On 0.29.0, where decoding is patched."""
    attested = json.loads(ATTESTED.read_text())
    deployment = launch(replay.url, runtime={"vllm": "0.29.0", "python": "/p"})
    for planned, record in zip(deployment.plan.nodes, attested, strict=True):
        directory = Path(planned.directory)
        [process, *_] = json.loads((directory / "processes.json").read_text())
        (directory / "attest").mkdir(mode=0o700)
        written = json.dumps(record | {"pid": process["pid"]})
        (directory / f"attest/rank-{record['rank']:04d}.json").write_text(written)

    server, about = server_of(deployment, "candidate")
    outcome = verify(
        tmp_path / "run",
        Settings(GLANCE),
        brief_set(2),
        candidate=server,
        baseline=None,
        about={"candidate": about},
        progress=lambda *_: None,
    )
    names = sorted({name for record in attested for name in record["patches"]})
    assert {"config_gate", "draft_relay", "structured_drafts"} < set(names)
    identity = outcome.result["identity"]["candidate"]["about"]
    assert identity["patches"].split() == names
    for record in attested:
        assert identity["evidence"] == f"evidence decode: {record['evidence']['decode']['level']}"
    said = " ".join(" ".join(outcome.lines).split())
    assert f", {identity['evidence']}, patches {identity['patches']}" in said


def test_a_deployment_is_a_baseline_as_well_and_its_layout_is_kept(launched: Deployment) -> None:
    server, about = server_of(launched, "baseline")
    assert (server.role, server.url) == ("baseline", launched.plan.endpoint)
    assert server.headers == launched.gate_header
    assert (about["TP"], about["PP"]) == (
        launched.cluster.parallel.tensor,
        launched.cluster.parallel.pipeline,
    )
    assert about["argv"] == shlex.join(launched.plan.server.argv)
