"""Servers that cannot be believed: INCONCLUSIVE or a usage error with the reason, never PASS."""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from replay import CUT, DROP, HANG, Replay

from mtppp.cli.verify import command
from mtppp.engine import bulk
from mtppp.errors import MtpppError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

Answer = tuple[int, bytes] | None


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "PAUSES", (0.0, 0.0))


@pytest.fixture
def pair(replays: list[Replay]) -> tuple[Replay, Replay]:
    replays += [Replay(seed=1), Replay(seed=2)]
    return replays[0], replays[1]


@contextmanager
def tls_server(directory: Path) -> Iterator[int]:
    """Listens with a certificate of its own making, and ends every handshake; its port."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    file = directory / "own.pem"
    file.write_bytes(
        certificate.public_bytes(Encoding.PEM)
        + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                stream, _ = listener.accept()
            except OSError:  # closed: the test is over
                return
            with contextlib.suppress(OSError), stream:
                context.wrap_socket(stream, server_side=True).close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def verify(pair: tuple[Replay, Replay], directory: Path, *arguments: str) -> tuple[int, str]:
    """Exit status, and all that was said; an error is told as `mtppp` would tell it."""
    prompts = directory / "prompts.jsonl"
    if not prompts.exists():
        from mtppp.verify.prompts import own_set

        lines = [{"text": p.text} for p in own_set(30) if p.text]
        prompts.write_text("\n".join(json.dumps(line) for line in lines))
    candidate, baseline = pair
    base = ["--candidate-url", candidate.url, "--baseline-url", baseline.url]
    more = ["--prompts", str(prompts), "-o", str(directory / "out"), "--timeout", "20"]
    done = CliRunner().invoke(command, [*base, *more, *arguments])
    if isinstance(done.exception, MtpppError):
        error = done.exception
        return error.exit_status, f"{error.message} {error.hint}"
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def completions(change: Callable[[dict[str, Any]], Any]) -> Callable[..., Answer]:
    """A server whose answers to /v1/completions are changed."""

    def misbehave(replay: Replay) -> Callable[[str, dict[str, Any]], Answer]:
        def wrong(path: str, body: dict[str, Any]) -> Answer:
            if path != "/v1/completions":
                return None
            replay.misbehave = None
            try:
                status, content = replay.answer(path, body)
            finally:
                replay.misbehave = wrong
            answer = json.loads(content)
            changed = change(answer)
            return status, json.dumps(answer if changed is None else changed).encode()

        return wrong

    return misbehave


def choice(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["choices"][0]
    return found


def in_scores(value: Any) -> Callable[[dict[str, Any]], None]:
    """Puts a value in place of the last log probability."""

    def change(answer: dict[str, Any]) -> None:
        if positions := choice(answer).get("prompt_logprobs"):
            for entry in positions[-1].values():
                entry["logprob"] = value

    return change


def shift_scores(answer: dict[str, Any]) -> None:
    if positions := choice(answer).get("prompt_logprobs"):
        choice(answer)["prompt_logprobs"] = [None, *positions[1:-1][::-1], positions[1]]


def same_id(answer: dict[str, Any]) -> None:
    answer["id"] = "cmpl-0"


def other_prompt(answer: dict[str, Any]) -> None:
    choice(answer)["prompt_token_ids"] = [0, 1, 2]


def without(*names: str) -> Callable[[dict[str, Any]], None]:
    def change(answer: dict[str, Any]) -> None:
        for name in names:
            choice(answer).pop(name, None)

    return change


def short_scores(answer: dict[str, Any]) -> None:
    if positions := choice(answer).get("prompt_logprobs"):
        positions.pop()


BAD_ANSWERS = {
    "text without ids": ("candidate", without("token_ids"), "without token ids"),
    "ids that are none": (
        "candidate",
        lambda answer: choice(answer).update(token_ids=[1, "2"]),
        "as vLLM does",
    ),
    "ignores prompt_logprobs": ("baseline", without("prompt_logprobs"), "ignores prompt_logprobs"),
    "too few scores": ("baseline", short_scores, "one entry for each"),
    "NaN": ("baseline", in_scores(float("nan")), "not numbers"),
    "null scores": ("baseline", in_scores(None), "its own token"),
    "positive log probability": ("baseline", in_scores(0.7), "cannot be"),
    "shifted scores": ("baseline", shift_scores, "its own token"),
    "duplicated ids": ("baseline", same_id, "same id"),
    "another prompt": ("candidate", other_prompt, "other prompt tokens"),
    "no choices": ("candidate", lambda answer: answer.update(choices=[]), "as vLLM does"),
    "a list": ("candidate", lambda _: [1, 2], "as vLLM does"),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_answers_that_cannot_be_used(
    name: str, pair: tuple[Replay, Replay], tmp_path: Path
) -> None:
    role, change, said = BAD_ANSWERS[name]
    server = pair[0] if role == "candidate" else pair[1]
    server.misbehave = completions(change)(server)
    status, output = verify(pair, tmp_path)
    assert status == 3
    assert "INCONCLUSIVE" in output
    assert said in " ".join(output.split())
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["verdict"] == "INCONCLUSIVE"
    assert role in result["why"][0]


BAD_STATUS = {
    "429 for ever": (429, b"busy", 3, "answered 429"),
    "500": (500, b"EngineCore died", 3, "EngineCore died"),
    "503": (503, b"", 3, "answered 503"),
    "400": (400, b'{"error":{"message":"no"}}', 3, "answered 400"),
    "401": (401, b"no", 2, "MTPPP_CANDIDATE_KEY"),
    "not JSON": (200, b"<html>hello", 3, "did not answer with JSON"),
    "truncated": (CUT, b'{"choices": [', 3, "broke off before its end"),
    "dropped": (DROP, b"", 3, "disconnected"),
}


@pytest.mark.parametrize("name", BAD_STATUS)
def test_servers_that_fail(name: str, pair: tuple[Replay, Replay], tmp_path: Path) -> None:
    status, body, expected, said = BAD_STATUS[name]
    pair[0].misbehave = lambda path, _: (status, body) if path == "/v1/completions" else None
    got, output = verify(pair, tmp_path)
    assert got == expected
    if expected == 3:
        result = json.loads((tmp_path / "out" / "result.json").read_text())
        assert said in result["why"][0]
        assert "attempts failed" in result["next_steps"][0] or status in (200, 400)
    else:
        assert said in output


def test_a_hang_is_given_up(pair: tuple[Replay, Replay], tmp_path: Path) -> None:
    pair[1].misbehave = lambda path, _: (HANG, b"2") if path == "/v1/completions" else None
    status, output = verify(pair, tmp_path, "--timeout", "0.5")
    assert status == 3
    assert "gave no answer" in " ".join(output.split())


def test_a_moment_of_trouble_is_overcome(pair: tuple[Replay, Replay], tmp_path: Path) -> None:
    troubles = iter([(429, b""), (503, b""), (DROP, b"")] + [None] * 10_000)
    pair[0].misbehave = lambda path, _: next(troubles) if path == "/v1/completions" else None
    status, output = verify(pair, tmp_path)
    assert "answered 429" not in output  # a port may have these digits
    assert status == 3
    assert "damaged" in output  # too few prompts for more


def test_the_wrong_name_is_a_mistake_of_the_operator(
    pair: tuple[Replay, Replay], tmp_path: Path
) -> None:
    status, output = verify(pair, tmp_path, "--baseline-model", "nope")
    assert status == 2
    assert "serves demo-glm4-moe, not nope" in output


@pytest.mark.parametrize("url", ["nonsense", "http://", "ftp://127.0.0.1", "http://127.0.0.1:9"])
def test_urls_that_lead_nowhere(url: str, pair: tuple[Replay, Replay], tmp_path: Path) -> None:
    status, output = verify(pair, tmp_path, "--baseline-url", url)
    assert status in (2, 3)
    assert "baseline" in output or "URL" in output


@pytest.mark.parametrize(
    ("url", "key"),
    [("http://a..b:80", ""), ("http://user:pw@127.0.0.1:9", "k"), ("", "k\r\n")],
)
def test_what_cannot_be_sent_is_a_mistake_of_the_operator(
    url: str,
    key: str,
    pair: tuple[Replay, Replay],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = url or pair[1].url
    monkeypatch.setenv("MTPPP_BASELINE_KEY", key)
    status, said = verify(pair, tmp_path, "--baseline-url", url)
    assert status == 2
    assert f"the baseline at {url} cannot be asked: " in said
    assert "MTPPP_BASELINE_KEY" in said


def test_a_certificate_that_nobody_vouches_for(pair: tuple[Replay, Replay], tmp_path: Path) -> None:
    with tls_server(tmp_path) as port:
        status, said = verify(pair, tmp_path, "--baseline-url", f"https://127.0.0.1:{port}")
    assert status == 3
    assert "certificate verify failed" in " ".join(said.split())


def test_nobody_who_listens_is_told_at_once(
    pair: tuple[Replay, Replay], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "PAUSES", (60.0,))
    status, output = verify(pair, tmp_path, "--candidate-url", "http://localhost:1")
    said = " ".join(output.split())
    assert status == 3
    assert "http://localhost:1: connection refused: nothing listens there" in said
    assert "start the candidate" in said
    assert "? verify" in output
    assert "longest" not in output


def test_another_model(pair: tuple[Replay, Replay], tmp_path: Path) -> None:
    pair[1].root = "/models/other"
    status, output = verify(pair, tmp_path)
    assert status == 3
    assert "other weights" in output
    assert not any(path == "/v1/completions" for path, _ in pair[0].asked)
    status, output = verify(pair, tmp_path, "--same-model")
    assert "other weights" not in output


def test_another_revision(pair: tuple[Replay, Replay], tmp_path: Path) -> None:
    for server, revision in zip(pair, ("0123abcd", "4567abcd"), strict=True):
        server.root = f"/cache/models--org--demo/snapshots/{revision}"
    status, output = verify(pair, tmp_path)
    assert status == 3
    assert "another revision" in output


def test_another_tokenizer(
    pair: tuple[Replay, Replay], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair[0], "ids_of", lambda text: [7] * 20)
    status, output = verify(pair, tmp_path)
    assert status == 3
    assert "another tokenizer" in output


def test_another_vocabulary(pair: tuple[Replay, Replay], tmp_path: Path) -> None:
    pair[0].fault = lambda recorded, tokens, chance: [*tokens[:-1], 100_000]
    status, output = verify(pair, tmp_path)
    assert status == 3
    assert "another vocabulary" in " ".join(output.split())


def test_no_tokenizer_needs_ids(pair: tuple[Replay, Replay], tmp_path: Path) -> None:
    for server in pair:
        server.tokenizer = False
    status, output = verify(pair, tmp_path)
    assert status == 2
    assert "token_ids" in output
    own = tmp_path / "ids.jsonl"
    own.write_text("\n".join(json.dumps({"token_ids": [0, 5, 6, 7, i]}) for i in range(9)))
    arguments = ("--prompts", str(own), "-o", str(tmp_path / "ids"))
    status, output = verify(pair, tmp_path, *arguments)
    assert status == 3
    assert "give at least 273 prompts" in output


def test_candidate_is_not_asked_for_log_probabilities(
    pair: tuple[Replay, Replay], tmp_path: Path
) -> None:
    verify(pair, tmp_path)
    generating = [b for p, b in pair[0].asked if p == "/v1/completions"]
    assert generating
    assert not any("logprobs" in key for body in generating for key in body)
    salts = [
        body["cache_salt"] for server in pair for p, body in server.asked if "completions" in p
    ]
    assert len(set(salts)) == len(salts)


def test_death_midway_is_told_and_the_run_goes_on_later(
    pair: tuple[Replay, Replay], tmp_path: Path
) -> None:
    answered = []

    def dies(path: str, body: dict[str, Any]) -> Answer:
        if path == "/v1/completions" and len(answered) >= 10:
            return DROP, b""
        answered.append(path) if path == "/v1/completions" else None
        return None

    pair[0].misbehave = dies
    status, output = verify(pair, tmp_path, "--concurrency", "1")
    assert status == 3
    assert "attempts failed" in output or "the candidate at" in output
    asked = {tuple(b["prompt"]) for p, b in pair[0].asked if "completions" in p}
    assert len(asked) == 11

    pair[0].misbehave = None
    pair[0].asked.clear()
    status, output = verify(pair, tmp_path, "--concurrency", "1")
    greedy = [b for p, b in pair[0].asked if "completions" in p and b["temperature"] == 0]
    assert len(greedy) == 26 - 10
    assert "the candidate at" not in output

    (tmp_path / "prompts.jsonl").write_text('{"text": "Once"}')
    status, output = verify(pair, tmp_path)
    assert status == 2
    assert "holds another run" in output
