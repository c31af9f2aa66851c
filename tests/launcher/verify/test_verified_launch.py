"""What a launch ends with, and whether the gate opens then; `test_phases_gate.py` has the gate."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from replay import Recorded, Replay

from mtppp.cluster import Cluster
from mtppp.console import Console, Step
from mtppp.engine.client import EngineError
from mtppp.errors import ConfigurationError, MtpppError
from mtppp.hosts.forward import PrivateForwarder
from mtppp.phases.deployment import Deployment
from mtppp.phases.gate import Gate
from mtppp.phases.launch import LAUNCH, launch_phases
from mtppp.phases.reach import Way
from mtppp.phases.verify import FindBaseline, SelfScore, Verify, candidate_of
from mtppp.plan.review import Review
from mtppp.verify.prompts import own_set
from mtppp.verify.record import Record
from mtppp.verify.run import Settings
from mtppp.verify.session import STORED, manifest
from mtppp.verify.tiers import GLANCE, TIERS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

Launched = Callable[..., Deployment]


def neighbours_swapped(_: Recorded, tokens: list[int], chance: random.Random) -> Sequence[int]:
    place = chance.randrange(len(tokens) - 1)
    return [*tokens[:place], tokens[place + 1], tokens[place], *tokens[place + 2 :]]


def every_third_random(_: Recorded, tokens: list[int], chance: random.Random) -> Sequence[int]:
    return [chance.randrange(512) if i % 3 == 2 else token for i, token in enumerate(tokens)]


@pytest.fixture
def servers(replays: list[Replay]) -> tuple[Replay, Replay]:
    """The deployment's, and the baseline."""
    replays += [Replay(seed=1), Replay(seed=2)]
    return replays[0], replays[1]


@pytest.fixture
def launched(
    servers: tuple[Replay, Replay],
    make_cluster: Callable[..., Cluster],
    make_review: Callable[..., Review],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Launched:
    """A deployment that serves, whose file has these keys under `verify`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def make(**section: Any) -> Deployment:
        section = {"baseline_url": servers[1].url} | section
        review = make_review()
        plan = dataclasses.replace(review.plan, endpoint=servers[0].url)
        servers[0].model = "demo"
        return Deployment(
            cluster=make_cluster(verify={k: v for k, v in section.items() if v is not None}),
            file=Path("cluster.yaml"),
            nodes=[],
            reviewed=dataclasses.replace(review, plan=plan),
            _way=Way("", None),
        )

    return make


@pytest.fixture
def step() -> Step:
    return Step(Console(), "verify")


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why the gate was opened; nothing while it is closed. There are no nodes here to ask."""
    gate = Gate("/run", "key", "instance", None)
    why: list[str] = []

    def held(deployment: Deployment, _: str) -> Gate:
        deployment.gate_key = gate.key
        return gate

    monkeypatch.setattr("mtppp.phases.verify.held", held)
    monkeypatch.setattr("mtppp.phases.verify.identity", lambda _: {"weights": "abc"})
    monkeypatch.setattr("mtppp.phases.verify.open_gate", lambda *given: why.append(given[-1]))
    return why


def test_a_right_one_passes(
    launched: Launched, step: Step, tmp_path: Path, opened: list[str]
) -> None:
    deployment = launched()
    Verify().run(deployment, step)
    assert step.note.startswith("PASS: less than")
    assert (deployment.exit_status, list(deployment.report)) == (0, [])
    assert list(tmp_path.glob("mtppp-verify/*-demo/result.json"))
    assert opened == ["PASS of the smoke tier"]
    [file] = tmp_path.glob("mtppp-verify/*-demo/result.json")
    about = json.loads(file.read_text())["identity"]["candidate"]["about"]
    layout = {"TP": 1, "PP": 2, "drafts": 3}
    patches = " ".join(sorted(deployment.plan.patches))
    assert "invariants" in patches
    assert about == layout | {
        "evidence": "evidence decode: engine",
        "patches": patches,
        "weights": "abc",
    }


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few prompts that a run takes a second; enough for FAIL."""
    monkeypatch.setattr("mtppp.phases.verify.own_set", lambda _: own_set(40))


@pytest.mark.usefixtures("few")
def test_a_wrong_one_is_stopped_or_kept_as_the_file_says(
    launched: Launched, servers: tuple[Replay, Replay], step: Step, opened: list[str]
) -> None:
    servers[0].fault = neighbours_swapped
    with pytest.raises(MtpppError, match="does not give the baseline's model") as caught:
        Verify().run(launched(), step)
    assert caught.value.exit_status == 1
    assert caught.value.details[0].startswith("FAIL, decode or speculation")

    deployment = launched(on_fail="keep-gated")
    Verify().run(deployment, step)
    assert deployment.exit_status == 1
    assert deployment.report[0].startswith("FAIL")
    assert "holds requests of others" in deployment.report[-1]
    assert deployment.holding
    assert not opened

    deployment = launched(on_fail="keep")
    Verify().run(deployment, step)
    assert deployment.exit_status == 1
    assert "holds requests of others" not in "".join(deployment.report)
    assert not deployment.holding
    assert opened == ["FAIL, decode or speculation, at your own risk as verify.on_fail says"]


@pytest.mark.usefixtures("few")
def test_a_baseline_that_dies_leaves_the_deployment_and_says_so(
    launched: Launched, servers: tuple[Replay, Replay], step: Step, opened: list[str]
) -> None:
    servers[1].misbehave = lambda path, _: (400, b"no") if path == "/v1/completions" else None
    deployment = launched()
    Verify().run(deployment, step)
    assert deployment.exit_status == 3
    assert deployment.report[0].startswith("INCONCLUSIVE")
    assert not opened

    deployment = launched(on_inconclusive="keep")
    Verify().run(deployment, step)
    assert deployment.exit_status == 3
    assert opened == ["INCONCLUSIVE, at your own risk as verify.on_inconclusive says"]


@pytest.mark.usefixtures("few")
def test_a_baseline_that_cannot_be_asked_leaves_the_deployment(
    launched: Launched, servers: tuple[Replay, Replay], step: Step, opened: list[str]
) -> None:
    servers[1].tokenizer = False
    deployment = launched()
    Verify().run(deployment, step)
    assert step.note.startswith("INCONCLUSIVE: the baseline at ")
    assert "has no tokenizer" in step.note
    assert (deployment.exit_status, step.succeeded) == (3, None)
    assert "holds requests of others" in deployment.report[-1]
    assert deployment.holding
    assert not opened


@pytest.fixture
def alone(launched: Launched) -> Launched:
    """The same without a baseline."""
    return lambda **section: launched(baseline_url=None, **section)


def test_without_a_baseline_a_few_answers_are_scored_in_seconds(
    alone: Launched,
    servers: tuple[Replay, Replay],
    step: Step,
    opened: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    deployment = alone()
    SelfScore().run(deployment, step)
    assert capsys.readouterr().err.count("\n") == 2
    assert step.note.startswith("it objects to 0 of its own ")
    assert "weights and forward pass were not compared" in step.note
    assert opened == ["self-score, 0 of 128 tokens objected to; compared with nothing"]
    assert (deployment.exit_status, list(deployment.report)) == (0, [])
    completions = [body for path, body in servers[0].asked if path == "/v1/completions"]
    assert len(completions) <= 3 * GLANCE.requests
    assert not any(body.get("temperature") for body in completions)
    assert not list(tmp_path.glob("mtppp-verify-demo-*"))


def test_gross_faults_of_decoding_need_no_baseline(
    alone: Launched,
    servers: tuple[Replay, Replay],
    step: Step,
    opened: list[str],
    tmp_path: Path,
) -> None:
    servers[0].fault = every_third_random
    with pytest.raises(MtpppError, match="demo objects to its own tokens") as caught:
        SelfScore().run(alone(), step)
    said = " ".join(" ".join(caught.value.details).split())
    assert said.startswith("FAIL, decode or speculation")
    assert "tokens are none that the candidate itself would have emitted" in said
    assert ", PP 2, drafts 3, evidence decode: engine, patches attest " in said
    assert ", weights abc" in said
    assert "baseline's own" not in said
    assert not opened
    assert len(list(tmp_path.glob("mtppp-verify-demo-*/result.json"))) == 1

    deployment = alone(on_fail="keep-gated")
    SelfScore().run(deployment, step)
    assert deployment.exit_status == 1
    assert not opened


def test_what_is_odd_and_no_fail_stays_gated(
    alone: Launched, servers: tuple[Replay, Replay], step: Step, opened: list[str]
) -> None:
    servers[0].fault = neighbours_swapped
    deployment = alone()
    SelfScore().run(deployment, step)
    assert step.note.startswith("INCONCLUSIVE: it objects to ")
    assert deployment.exit_status == 3
    assert not opened


def test_a_server_that_cannot_score_stays_gated(
    alone: Launched, servers: tuple[Replay, Replay], step: Step, opened: list[str]
) -> None:
    servers[0].misbehave = lambda _, body: (400, b"no") if "prompt_logprobs" in body else None
    deployment = alone()
    SelfScore().run(deployment, step)
    assert deployment.exit_status == 3
    assert deployment.report[0].startswith("INCONCLUSIVE")
    assert not opened


def test_a_server_without_a_tokenizer_stays_gated(
    alone: Launched, servers: tuple[Replay, Replay], step: Step, opened: list[str]
) -> None:
    servers[0].tokenizer = False
    deployment = alone(on_inconclusive="keep")
    SelfScore().run(deployment, step)
    assert "has no tokenizer" in step.note
    assert deployment.exit_status == 3
    assert opened == ["INCONCLUSIVE, at your own risk as verify.on_inconclusive says"]


def test_a_launch_ends_as_the_file_says(make_cluster: Callable[..., Cluster]) -> None:
    assert launch_phases(make_cluster(verify={"enabled": False})) == LAUNCH
    *before, last = launch_phases(make_cluster())
    assert tuple(before) == LAUNCH
    assert isinstance(last, SelfScore)
    first, *_, last = launch_phases(make_cluster(verify={"baseline_url": "http://b:1"}))
    assert isinstance(first, FindBaseline)
    assert isinstance(last, Verify)


def test_a_baseline_that_is_not_there_is_noticed_before_anything_starts(
    launched: Launched, servers: tuple[Replay, Replay], step: Step
) -> None:
    FindBaseline().run(launched(), step)
    assert step.note.endswith("serves demo-glm4-moe")
    servers[1].misbehave = lambda *_: (503, b"")
    with pytest.raises(EngineError, match="503"):
        FindBaseline().run(launched(), step)
    with pytest.raises(ConfigurationError, match="holds no record"):
        FindBaseline().run(launched(baseline="nowhere", baseline_url=None), step)


def test_a_stored_baseline_that_a_launch_cannot_use_is_noticed_then_too(
    launched: Launched, tmp_path: Path, step: Step
) -> None:
    tier = TIERS["smoke"]
    deployment = launched(baseline="kept", baseline_url=None)
    about = {"kind": STORED, "baseline": "http://b:1"}
    for prompts, said in ((own_set(3), "other prompts"), (own_set(tier.requests), "")):
        shutil.rmtree(tmp_path / "kept", ignore_errors=True)
        record = Record.open(tmp_path / "kept", manifest(Settings(tier), prompts, **about))
        with pytest.raises(ConfigurationError, match="no complete baseline"):
            FindBaseline().run(deployment, step)
        record.note("null", {})
        if not said:
            FindBaseline().run(deployment, step)
            assert step.note.endswith("kept, smoke tier")
            continue
        with pytest.raises(ConfigurationError, match=said) as caught:
            FindBaseline().run(deployment, step)
        assert "record it without --prompts" in caught.value.hint


@pytest.mark.parametrize(
    "section",
    [
        {"baseline": "a", "baseline_url": "http://b:1"},
        {"baseline_url": "b:1"},
        {"baseline": "a", "enabled": False},
    ],
)
def test_one_baseline_at_most_is_named(make_cluster: Callable[..., Cluster], section: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_cluster(verify=section)
    assert any("verify" in line for line in caught.value.details)


def test_a_candidate_is_reached_through_its_forwarder(launched: Launched) -> None:
    deployment = launched()
    deployment.gate_key = "key"
    with closing(
        PrivateForwarder(lambda: pytest.fail("nothing is to be carried yet"))
    ) as forwarder:
        deployment._way = Way("h100-a", forwarder)
        server = candidate_of(deployment, "http://10.0.0.1:8000")
    assert (server.socket, server.transport) == (forwarder.path, "through ssh to h100-a")
    assert server.model == "demo"
    assert server.headers == {"x-mtppp-gate-key": "key"}
