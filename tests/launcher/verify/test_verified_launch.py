"""What a launch ends with, where its file names a baseline."""

from __future__ import annotations

import dataclasses
import random
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
from mtppp.phases.launch import LAUNCH, launch_phases
from mtppp.phases.reach import Way
from mtppp.phases.verify import FindBaseline, Verify, candidate_of
from mtppp.plan.review import Review
from mtppp.verify.prompts import own_set

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

Launched = Callable[..., Deployment]


def neighbours_swapped(_: Recorded, tokens: list[int], chance: random.Random) -> Sequence[int]:
    place = chance.randrange(len(tokens) - 1)
    return [*tokens[:place], tokens[place + 1], tokens[place], *tokens[place + 2 :]]


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

    def make(**section: Any) -> Deployment:
        section = {"baseline_url": servers[1].url} | section
        review = make_review()
        plan = dataclasses.replace(review.plan, endpoint=servers[0].url)
        servers[0].model = "demo"
        return Deployment(
            cluster=make_cluster(verify={k: v for k, v in section.items() if v}),
            file=Path("cluster.yaml"),
            nodes=[],
            reviewed=dataclasses.replace(review, plan=plan),
            _way=Way("", None),
        )

    return make


@pytest.fixture
def step() -> Step:
    return Step(Console(), "verify")


def test_a_right_one_passes(launched: Launched, step: Step, tmp_path: Path) -> None:
    deployment = launched()
    Verify().run(deployment, step)
    assert step.note.startswith("PASS: less than")
    assert (deployment.exit_status, list(deployment.report)) == (0, [])
    assert list(tmp_path.glob("mtppp-verify/*-demo/result.json"))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few prompts that a run takes a second; enough for FAIL."""
    monkeypatch.setattr("mtppp.phases.verify.own_set", lambda _: own_set(40))


@pytest.mark.usefixtures("few")
def test_a_wrong_one_is_stopped_or_kept_as_the_file_says(
    launched: Launched, servers: tuple[Replay, Replay], step: Step
) -> None:
    servers[0].fault = neighbours_swapped
    with pytest.raises(MtpppError, match="does not give the baseline's model") as caught:
        Verify().run(launched(), step)
    assert caught.value.exit_status == 1
    assert caught.value.details[0].startswith("FAIL, decode or speculation")

    deployment = launched(on_fail="keep")
    Verify().run(deployment, step)
    assert deployment.exit_status == 1
    assert deployment.report[0].startswith("FAIL")


@pytest.mark.usefixtures("few")
def test_a_baseline_that_dies_leaves_the_deployment_and_says_so(
    launched: Launched, servers: tuple[Replay, Replay], step: Step
) -> None:
    servers[1].misbehave = lambda path, _: (400, b"no") if path == "/v1/completions" else None
    deployment = launched()
    Verify().run(deployment, step)
    assert deployment.exit_status == 3
    assert deployment.report[0].startswith("INCONCLUSIVE")


def test_only_a_file_that_names_a_baseline_is_verified_by_it(
    make_cluster: Callable[..., Cluster],
) -> None:
    assert launch_phases(make_cluster()) == LAUNCH
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


@pytest.mark.parametrize(
    "section", [{}, {"baseline": "a", "baseline_url": "http://b:1"}, {"baseline_url": "b:1"}]
)
def test_one_baseline_is_named(make_cluster: Callable[..., Cluster], section: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_cluster(verify=section)
    assert any("verify" in line for line in caught.value.details)


def test_a_candidate_is_reached_through_its_forwarder(launched: Launched) -> None:
    deployment = launched()
    with closing(
        PrivateForwarder(lambda: pytest.fail("nothing is to be carried yet"))
    ) as forwarder:
        deployment._way = Way("h100-a", forwarder)
        server = candidate_of(deployment, "http://10.0.0.1:8000")
    assert (server.socket, server.transport) == (forwarder.path, "through ssh to h100-a")
    assert server.model == "demo"
