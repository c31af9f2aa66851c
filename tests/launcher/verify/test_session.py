"""A whole verification over HTTP, against recorded answers of a real server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest
import yaml
from click.testing import CliRunner, Result
from replay import Recorded, Replay

from mtppp.cli.answers import command as answers
from mtppp.cli.baseline import command as baselines
from mtppp.cli.verify import command as verify
from mtppp.engine.bulk import BulkClient
from mtppp.errors import ConfigurationError, Inconclusive, MtpppError
from mtppp.hosts.forward import PrivateForwarder
from mtppp.verify.prompts import own_set
from mtppp.verify.result import junit
from mtppp.verify.servers import Identity, Server, changed, differences, same_server
from mtppp.verify.tiers import TIERS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

METRICS = """vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {second}
"""


@pytest.fixture
def candidate(replays: list[Replay]) -> Replay:
    replays.append(Replay(seed=1))
    return replays[-1]


@pytest.fixture
def baseline(replays: list[Replay]) -> Replay:
    replays.append(Replay(seed=2))
    return replays[-1]


def compare(candidate: Replay, baseline: Replay, directory: Path, *more: str) -> Result:
    urls = ["--candidate-url", candidate.url, "--baseline-url", baseline.url + "/v1/"]
    return CliRunner().invoke(verify, [*urls, "-o", str(directory), *more])


@pytest.fixture
def few(tmp_path: Path) -> list[str]:
    """So few prompts that a run takes a second."""
    file = tmp_path / "few.jsonl"
    file.write_text("\n".join(json.dumps({"text": p.text}) for p in own_set(40) if p.text))
    return ["--prompts", str(file)]


def result_of(directory: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return result


def repeats_tokens(recorded: Recorded, tokens: list[int], chance: random.Random) -> Sequence[int]:
    """Now and then a token comes twice."""
    place = chance.randrange(len(tokens))
    return tokens[:place] + tokens[place : place + 1] + tokens[place:]


def test_the_same_model_passes(candidate: Replay, baseline: Replay, tmp_path: Path) -> None:
    candidate.metrics = METRICS.format(drafts=0, first=0, second=0)
    done = compare(candidate, baseline, tmp_path)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("PASS")
    assert max(len(line) for line in lines) <= 80
    result = result_of(tmp_path)
    assert result["schema"] == 1
    assert result["verdict"] == "PASS"
    assert result["figures"]["requests"] == 300
    assert result["control"]["fails"]
    assert sum(d["made"] for d in result["control"]["damaged"]) >= 100
    assert result["power"]["damaged_tokens"][0]["fails"] > 0.99
    assert result["identity"]["baseline"]["release"] == "0.32.0"
    assert result["acceptance"]["verdict"] == "NOT JUDGED"
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert {case.get("name") for case in suite} == {"text", "drafts"}
    assert (suite.get("failures"), suite.get("errors")) == ("0", "0")
    # As docs/verify.md says of the tier.
    control = result["control"]
    made = sum(d["made"] for d in control["damaged"]) + control["ruined"]["made"]
    smoke = TIERS["smoke"]
    assert generated_and_scored(candidate) == (smoke.requests + smoke.sampled, 0)
    scored = 2 * smoke.requests + smoke.alone + smoke.sampled + made
    assert generated_and_scored(baseline) == (smoke.requests + smoke.alone, scored)


def generated_and_scored(server: Replay) -> tuple[int, int]:
    """How many completions were asked for, and how many scores; what is asked again counts once."""
    asked = {
        body["cache_salt"]: "prompt_logprobs" in body
        for path, body in server.asked
        if path == "/v1/completions"
    }
    scores = list(asked.values()).count(True)
    return len(asked) - scores, scores


def test_a_faulty_one_fails_and_the_report_shows_where(
    candidate: Replay, baseline: Replay, tmp_path: Path, few: list[str]
) -> None:
    candidate.fault = repeats_tokens
    done = compare(candidate, baseline, tmp_path, *few)
    assert done.exit_code == 1, done.output
    assert done.stdout.startswith("FAIL, decode or speculation")
    assert "✗ verify" in done.stderr
    assert "Worst tokens" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    result = result_of(tmp_path)
    assert len(result["worst"]) == 5
    assert result["directions"]["cand_cand"]["outliers"] > 20
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert suite.get("failures") == "1"


def test_answers_that_are_cut_are_no_ends_though_the_server_calls_them_so(
    candidate: Replay, baseline: Replay, tmp_path: Path, few: list[str]
) -> None:
    candidate.fault = lambda _, tokens, chance: tokens[: 8 if chance.random() < 0.6 else None]
    candidate.calls_finished = True
    done = compare(candidate, baseline, tmp_path, *few)
    assert done.exit_code == 1, done.output
    assert done.stdout.startswith("FAIL, ends of answers")
    assert result_of(tmp_path)["figures"]["outliers"] == 0


def test_sampled_answers_without_a_token_are_seen_though_there_is_nothing_to_score(
    candidate: Replay, baseline: Replay, tmp_path: Path, few: list[str]
) -> None:
    candidate.sampled_fault = lambda *_: []
    done = compare(candidate, baseline, tmp_path, *few)
    assert done.exit_code == 1, done.output
    assert done.stdout.startswith("FAIL, ends of answers")
    assert result_of(tmp_path)["sampled"] is None


def test_a_verdict_is_never_given_out_again_for_another_server(
    candidate: Replay, baseline: Replay, tmp_path: Path, few: list[str]
) -> None:
    assert compare(candidate, baseline, tmp_path, *few).exit_code == 3
    before = (tmp_path / "result.json").read_bytes()
    candidate.fault = repeats_tokens
    done = compare(candidate, baseline, tmp_path, *few)
    assert isinstance(done.exception, ConfigurationError)
    assert "finished" in done.exception.message
    assert (tmp_path / "result.json").read_bytes() == before


def test_an_interrupted_run_goes_on_with_the_same_server_alone(
    candidate: Replay, baseline: Replay, tmp_path: Path, few: list[str]
) -> None:
    baseline.misbehave = lambda path, _: (400, b"no") if path == "/v1/completions" else None
    assert compare(candidate, baseline, tmp_path, *few).exit_code == 3
    baseline.misbehave = None
    root, candidate.root = candidate.root, "/elsewhere/demo-glm4-moe"
    done = compare(candidate, baseline, tmp_path, *few)
    assert isinstance(done.exception, ConfigurationError)
    assert "another candidate: root was /models/demo-glm4-moe" in done.exception.message
    candidate.root = root
    done = compare(candidate, baseline, tmp_path, *few)
    assert result_of(tmp_path)["figures"]["requests"] > 30


def test_a_deployment_that_was_launched_anew_is_another_server() -> None:
    first = Identity("http://a:1", "m", "/m", 0, "0.32.0", "directly", {"launched": "9:00"})
    again = dataclasses.replace(first, transport="through ssh")
    assert changed(first, again) == []
    again = dataclasses.replace(first, about={"launched": "9:30"})
    assert changed(first, again) == ["launched was 9:00, is 9:30"]


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({"weights": "ab (1 files)"}, {"weights": "ab (1 files)"}, []),
        ({"weights": "ab (1 files)"}, {}, []),
        ({"weights": "ab (1 files)"}, {"weights": "cd (1 files)"}, ["other weights"]),
        ({"config": "ab"}, {"config": "cd"}, ["another configuration"]),
        # What one node of a pipeline does wrong is to be found, not to be refused.
        ({"weights": "DIFFER: n1 ab, n2 cd"}, {"weights": "ab"}, []),
    ],
)
def test_hashes_must_be_the_same_where_both_are_known(
    ours: dict[str, str], theirs: dict[str, str], said: list[str]
) -> None:
    candidate, baseline = (
        Identity("http://a:1", "m", "/m", 0, "0.32.0", "directly", dict(about))
        for about in (ours, theirs)
    )
    found = differences(candidate, baseline)
    assert [text.partition(":")[0] for text in found] == said


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("http://localhost:80", "http://127.0.0.1/v1/", True),
        ("http://A.example:8000/", "http://a.example:8000", True),
        ("http://a:8000", "http://a:8001", False),
        ("http://a:8000", "https://a:8000", False),
        ("http://a:8000/x", "http://a:8000/y", False),
    ],
)
def test_urls_of_one_server_are_told(one: str, other: str, same: bool) -> None:
    assert same_server(Server("candidate", one), Server("baseline", other)) is same


def test_a_loopback_address_behind_a_socket_is_of_another_machine() -> None:
    url = "http://127.0.0.1:8000"
    there = Server("candidate", url, socket="/run/way")
    assert not same_server(there, Server("baseline", url))


def test_a_candidate_is_not_its_own_baseline(candidate: Replay, tmp_path: Path) -> None:
    done = compare(candidate, candidate, tmp_path / "out")
    assert isinstance(done.exception, ConfigurationError)
    assert "the same server" in done.exception.message
    assert "judges itself" in done.exception.hint
    assert not candidate.asked


def test_json_alone_is_on_standard_output(
    candidate: Replay, baseline: Replay, tmp_path: Path
) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"text": "Once"}\n')
    more = ["--json", "--prompts", str(own)]
    done = compare(candidate, baseline, tmp_path / "out", *more)
    assert done.exit_code == 3
    assert json.loads(done.stdout)["verdict"] == "INCONCLUSIVE"


def test_the_report_says_what_of_the_set_own_prompts_do_not_cover(
    candidate: Replay, baseline: Replay, tmp_path: Path
) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"text": "Once upon", "kind": "prose"}\n')
    done = compare(candidate, baseline, tmp_path / "out", "--prompts", str(own))
    said = " ".join(done.stdout.split())
    assert "prompts prose 1; the longest has 9 tokens. Of mtppp's set not covered:" in said
    assert "the kinds digits, language, tools, code," in said
    assert "; tokens 32-256, 257-2048, 2049-" in said


def test_without_a_baseline_it_judges_itself_and_says_what_it_cannot_see(
    candidate: Replay, tmp_path: Path, few: list[str]
) -> None:
    arguments = ["--candidate-url", candidate.url, *few, "-o", str(tmp_path)]
    done = CliRunner().invoke(verify, arguments)
    result = result_of(tmp_path)
    # The recorded model answers no question that was not recorded.
    assert result["verdict"] == "INCONCLUSIVE"
    assert done.exit_code == 3
    assert "well-known texts" in done.stdout
    assert "any model knows" in result["why"][-1]

    candidate.fault = repeats_tokens
    arguments[-1] = str(tmp_path / "faulty")
    done = CliRunner().invoke(verify, arguments)
    assert done.exit_code == 1, done.output
    assert done.stdout.startswith("FAIL, decode or speculation")


def test_answers_are_judged_elsewhere_as_at_once(
    candidate: Replay, baseline: Replay, tmp_path: Path
) -> None:
    there = str(tmp_path / "answers")
    done = CliRunner().invoke(answers, ["export", "--candidate-url", candidate.url, "-o", there])
    assert done.exit_code == 0, done.output
    assert not any("prompt_logprobs" in body for _, body in candidate.asked)
    candidate.stop()
    done = CliRunner().invoke(answers, ["score", there, "--baseline-url", baseline.url])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("PASS")
    assert result_of(Path(there))["identity"]["candidate"]["model"] == "demo-glm4-moe"


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (answers, ["export", "--candidate-url"]),
        (baselines, ["record", "--baseline-url"]),
    ],
    ids=["export", "record"],
)
def test_what_is_kept_of_a_server_is_finished_once(
    command: click.Command, arguments: list[str], baseline: Replay, tmp_path: Path, few: list[str]
) -> None:
    there = [*arguments, baseline.url, "-o", str(tmp_path / "out"), *few]
    assert CliRunner().invoke(command, there).exit_code == 0
    kept = (tmp_path / "out" / "record.jsonl").read_bytes()
    done = CliRunner().invoke(command, there)
    assert isinstance(done.exception, ConfigurationError)
    assert "finished" in done.exception.message
    assert (tmp_path / "out" / "record.jsonl").read_bytes() == kept


def test_what_is_no_export_is_refused(baseline: Replay, tmp_path: Path) -> None:
    arguments = ["score", str(tmp_path), "--baseline-url", baseline.url]
    done = CliRunner().invoke(answers, arguments)
    assert isinstance(done.exception, ConfigurationError)
    assert "holds no record" in done.exception.message


def test_exported_ids_must_be_those_of_the_baselines_tokenizer(
    candidate: Replay, baseline: Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"text": "Once upon"}\n')
    more = ["--prompts", str(own)]
    there = str(tmp_path / "answers")
    export = ["export", "--candidate-url", candidate.url, "-o", there, *more]
    assert CliRunner().invoke(answers, export).exit_code == 0
    monkeypatch.setattr(baseline, "ids_of", lambda text: [9] * 9)
    score = ["score", there, "--baseline-url", baseline.url]
    done = CliRunner().invoke(answers, score)
    assert isinstance(done.exception, ConfigurationError)
    assert "other prompts" in done.exception.message
    done = CliRunner().invoke(answers, [*score, *more])
    assert done.exit_code == 3
    assert "another tokenizer" in done.output


@pytest.fixture
def stored(baseline: Replay, tmp_path: Path) -> str:
    """A recorded baseline; its server is gone."""
    there = str(tmp_path / "baseline")
    baseline.misbehave = drafting(baseline, 0.7, 0.4)
    done = CliRunner().invoke(baselines, ["record", "--baseline-url", baseline.url, "-o", there])
    assert done.exit_code == 0, done.output
    baseline.misbehave = lambda path, body: (500, b"gone")
    return there


def by_stored(candidate: Replay, stored: str, directory: Path, *more: str) -> Result:
    urls = ["--candidate-url", candidate.url, "--baseline", stored]
    return CliRunner().invoke(verify, [*urls, "-o", str(directory), *more])


def test_a_stored_baseline_passes_the_same_model_and_fails_another(
    candidate: Replay, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate.misbehave = drafting(candidate, 0.69, 0.1)
    done = by_stored(candidate, stored, tmp_path / "same")
    assert done.exit_code == 0, done.output
    # As with a drafter whose embedding was not loaded: the text is right, and drafts are not.
    assert done.stdout.startswith("PASS, with a warning")
    assert "drafts     LOW: drafts at position 2" in done.stdout
    [text, drafts] = ElementTree.parse(tmp_path / "same" / "junit.xml").getroot()
    assert (text.find("failure"), drafts.find("failure") is not None) == (None, True)
    candidate.misbehave = None
    assert "by a stored baseline" in done.stdout
    assert ", recorded 20" in " ".join(done.stdout.split())
    result = result_of(tmp_path / "same")
    assert result["figures"]["forced_tokens"] > 9000

    candidate.fault = repeats_tokens
    done = by_stored(candidate, stored, tmp_path / "decode")
    assert done.exit_code == 1, done.output
    assert done.stdout.startswith("FAIL, decode or speculation")
    assert "Worst tokens" in done.stdout
    worst = result_of(tmp_path / "decode")["worst"]
    assert len({one["key"] for one in worst}) == 5
    assert all(one["gap"] > 1 and one["token"] != one["wanted"] for one in worst)

    candidate.fault = None
    sound = candidate.scored

    def prefers_others(ids: tuple[int, ...], count: int = 1) -> list[dict[str, Any] | None]:
        positions = sound(ids, count)
        worse, better = {"logprob": -4.0, "rank": 2}, {"logprob": -0.1, "rank": 1}
        positions[-3] = {str(ids[-3]): worse, "511": better}
        return positions

    monkeypatch.setattr(candidate, "scored", prefers_others)
    done = by_stored(candidate, stored, tmp_path / "forward")
    assert done.exit_code == 1, done.output
    assert done.stdout.startswith("FAIL, weights or forward pass")


def test_a_stored_baseline_is_not_compared_with_what_is_not_its_like(
    candidate: Replay, stored: str, tmp_path: Path, few: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = by_stored(candidate, stored, tmp_path / "a", *few)
    assert isinstance(done.exception, ConfigurationError)
    assert "other prompts" in done.exception.message
    done = by_stored(candidate, stored, tmp_path / "b", "--tier", "soak")
    assert isinstance(done.exception, ConfigurationError)
    assert "for --tier smoke" in done.exception.message

    candidate.root = "/models/other"
    done = by_stored(candidate, stored, tmp_path / "c")
    assert (done.exit_code, "other weights" in done.output) == (3, True)
    candidate.root = "/models/demo-glm4-moe"
    monkeypatch.setattr(candidate, "ids_of", lambda text: [7] * 20)
    done = by_stored(candidate, stored, tmp_path / "d")
    assert (done.exit_code, "another tokenizer" in done.output) == (3, True)


def test_a_server_that_disagrees_with_itself_is_no_baseline(
    baseline: Replay, tmp_path: Path, few: list[str]
) -> None:
    baseline.fault = repeats_tokens
    there = str(tmp_path / "baseline")
    arguments = ["record", "--baseline-url", baseline.url, "-o", there, *few]
    done = CliRunner().invoke(baselines, arguments)
    assert isinstance(done.exception, Inconclusive)
    assert "no baseline" in done.exception.message
    done = by_stored(baseline, there, tmp_path / "out", *few)
    assert isinstance(done.exception, ConfigurationError)
    assert "no complete baseline" in done.exception.message


def drafting(server: Replay, *rates: float) -> Callable[[str, dict[str, Any]], Any]:
    """/metrics of a server of which so many drafts at each position are accepted."""

    def metrics(path: str, _: dict[str, Any]) -> tuple[int, bytes] | None:
        if path != "/metrics":
            return None
        drafts = 10 * sum(asked == "/v1/completions" for asked, _ in server.asked)
        first, second = (int(rate * drafts) for rate in rates)
        return 200, METRICS.format(drafts=drafts, first=first, second=second).encode()

    return metrics


def test_a_candidate_is_named_once(tmp_path: Path) -> None:
    done = CliRunner().invoke(verify, ["cluster.yaml", "--candidate-url", "http://127.0.0.1:1"])
    assert isinstance(done.exception, ConfigurationError)
    assert "both name the candidate" in done.exception.message


def test_a_deployment_that_does_not_run_is_not_verified(tmp_path: Path) -> None:
    file = tmp_path / "absent.yaml"
    nodes = [{"host": "here", "address": "127.0.1.9", "transport": "local", "gpus": 1}]
    content = {
        "name": "absent-for-verify",
        "model": {"id": "/models/demo"},
        "nodes": nodes,
        "runtime": {"vllm": "0.32.0", "python": sys.executable},
    }
    file.write_text(yaml.safe_dump(content))
    out = ["-o", str(tmp_path / "out")]
    for command, arguments in (
        (verify, [str(file), *out]),
        (answers, ["export", str(file), *out]),
        (baselines, ["record", str(file), *out]),
    ):
        done = CliRunner().invoke(command, arguments)
        assert isinstance(done.exception, MtpppError)
        assert "absent-for-verify is stopped" in done.exception.message
        assert "mtppp launch" in done.exception.hint


@pytest.mark.parametrize(("command", "arguments"), [(answers, ["export"]), (baselines, ["record"])])
def test_nothing_is_kept_of_nobody(
    command: click.Command, arguments: list[str], tmp_path: Path
) -> None:
    done = CliRunner().invoke(command, [*arguments, "-o", str(tmp_path / "out")])
    assert isinstance(done.exception, ConfigurationError)
    assert "name a deployment, or give --" in done.exception.hint


def test_hosts_that_cannot_be_reached_are_what_is_told(tmp_path: Path) -> None:
    file = tmp_path / "away.yaml"
    nodes = [{"host": "no-such-host.invalid", "address": "127.0.1.9", "gpus": 1}]
    content = {"name": "away-for-verify", "model": {"id": "/models/demo"}, "nodes": nodes}
    content["runtime"] = {"vllm": "0.32.0", "python": sys.executable}
    file.write_text(yaml.safe_dump(content))
    done = CliRunner().invoke(verify, [str(file)])
    assert isinstance(done.exception, MtpppError)
    assert "away-for-verify is unknown" in done.exception.message
    assert "can be reached" in done.exception.hint
    assert done.exception.details[0].startswith("no-such-host.invalid: ")


def test_warnings_reach_junit(tmp_path: Path) -> None:
    content = {
        "tier": {"name": "smoke"},
        "date": "2026-01-01",
        "seconds": 1.0,
        "why": [],
        "verdict": "PASS",
        "cause": None,
        "acceptance": {"verdict": "AS REFERENCE", "why": ""},
        "warnings": ["the mean gap is 0.1 nats"],
    }
    said = junit(content).getroot().findtext("testcase/system-out")
    assert said == "warning: the mean gap is 0.1 nats"


def test_a_server_behind_a_socket_is_asked_through_it(candidate: Replay) -> None:
    port = int(candidate.url.rpartition(":")[2])
    streams: list[socket.socket] = []

    def connect() -> socket.socket:
        streams.append(socket.create_connection(("127.0.0.1", port)))
        return streams[-1]

    async def ask(path: str) -> str:
        client = BulkClient("http://10.0.0.1:8000", role="candidate", socket=path)
        async with client:
            return (await client.models())[0].name

    with closing(PrivateForwarder(connect)) as forwarder:
        assert asyncio.run(ask(forwarder.path)) == "demo-glm4-moe"
    assert streams
