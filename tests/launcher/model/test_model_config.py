from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mtppp.errors import ConfigurationError, MtpppError
from mtppp.model.config import catalogue, differing_keys, find_config, semantic_hash
from mtppp.model.facts import read_facts

CONFIG = {"model_type": "glm4_moe", "num_hidden_layers": 2, "dtype": "bfloat16"}


class Hub(BaseHTTPRequestHandler):
    """A hub with one open, one gated, one moved and one broken model."""

    token = "a-token"
    seen: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        authorisation = self.headers.get("Authorization")
        self.seen.append((self.path, authorisation))
        if self.path.startswith("/org/gated/") and authorisation != f"Bearer {self.token}":
            return self._answer(401 if authorisation is None else 403, b"no")
        if self.path.startswith("/org/moved/"):
            return self._answer(307, b"", location="/org/open/resolve/main/config.json")
        if self.path.startswith("/org/broken/"):
            return self._answer(200, b"<html>")
        if self.path.startswith("/org/down/"):
            return self._answer(503, b"")
        if self.path in {
            "/org/open/resolve/main/config.json",
            "/org/open/resolve/v2/config.json",
            "/org/gated/resolve/main/config.json",
        }:
            return self._answer(200, json.dumps(CONFIG).encode())
        return self._answer(404, b"none")

    def _answer(self, status: int, body: bytes, location: str | None = None) -> None:
        self.send_response(status)
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment that points to the hub and to an empty cache."""
    Hub.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}/",
        "HF_HOME": str(tmp_path / "hf"),
    }
    server.shutdown()
    thread.join()
    server.server_close()


def put_in_cache(home: Path, model: str, commit: str, config: object, ref: str | None) -> None:
    repository = home / "hub" / f"models--{model.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(config))
    if ref:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(commit)


def test_a_file_and_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    from_directory = find_config(str(tmp_path), environ={})
    from_file = find_config(str(tmp_path / "config.json"), environ={})
    assert from_directory == from_file
    assert from_file.values == CONFIG
    assert from_file.directory == tmp_path


def test_a_directory_without_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"has no config\.json"):
        find_config(str(tmp_path), environ={})


@pytest.mark.parametrize("text", ["{", "[]", '"x"'])
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        find_config(str(file), environ={})


@pytest.mark.parametrize("model", ["nowhere", "/no/such/path", "a/b/c", "./x"])
def test_neither_a_path_nor_an_id(model: str) -> None:
    with pytest.raises(ConfigurationError, match="no such file or directory, and no hub id"):
        find_config(model, environ={})


def test_everything_in_the_catalogue_can_be_read() -> None:
    assert "zai-org/GLM-5.2-FP8" in catalogue()
    for model in catalogue():
        facts = read_facts(find_config(model, environ={}).values)
        assert facts.parameters, model
        assert facts.unknowns == (), model


def test_the_catalogue_needs_no_hub(hub: dict[str, str]) -> None:
    assert find_config("zai-org/GLM-5.2-FP8", environ=hub).origin.startswith("catalogue")
    assert Hub.seen == []


def test_the_cache_goes_before_the_hub(hub: dict[str, str]) -> None:
    put_in_cache(Path(hub["HF_HOME"]), "org/open", "abc123", CONFIG | {"cached": 1}, "main")
    found = find_config("org/open", environ=hub)
    assert found.values["cached"] == 1
    assert found.origin.startswith("cache")
    assert Hub.seen == []


def test_a_commit_in_the_cache(hub: dict[str, str]) -> None:
    put_in_cache(Path(hub["HF_HOME"]), "org/open", "abc123", CONFIG, None)
    assert find_config("org/open", revision="abc123", environ=hub).origin.startswith("cache")
    # The branch is not known to be that commit.
    assert find_config("org/open", environ=hub).origin.startswith("hub")


def test_hf_hub_cache_goes_before_hf_home(hub: dict[str, str], tmp_path: Path) -> None:
    put_in_cache(tmp_path / "other", "org/open", "abc123", CONFIG, "main")
    environ = hub | {"HF_HUB_CACHE": str(tmp_path / "other" / "hub")}
    assert find_config("org/open", environ=environ).origin.startswith("cache")


def test_the_hub(hub: dict[str, str]) -> None:
    found = find_config("org/open", environ=hub)
    assert found.values == CONFIG
    assert found.directory is None
    assert Hub.seen == [("/org/open/resolve/main/config.json", None)]


def test_a_revision(hub: dict[str, str]) -> None:
    find_config("org/open", revision="v2", environ=hub)
    assert Hub.seen == [("/org/open/resolve/v2/config.json", None)]


def test_a_redirect(hub: dict[str, str]) -> None:
    assert find_config("org/moved", environ=hub).values == CONFIG


def test_a_gated_model(hub: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="wants a token") as refused:
        find_config("org/gated", environ=hub)
    assert "set HF_TOKEN" in refused.value.hint
    with pytest.raises(ConfigurationError, match="403") as refused:
        find_config("org/gated", environ=hub | {"HF_TOKEN": "another"})
    assert "not granted" in refused.value.hint
    assert "another" not in f"{refused.value.message}{refused.value.hint}"
    assert find_config("org/gated", environ=hub | {"HF_TOKEN": Hub.token}).values == CONFIG


def test_no_such_model(hub: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=r"has no config\.json for it at revision main"):
        find_config("org/none", environ=hub)


def test_an_answer_that_is_no_json(hub: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="not JSON"):
        find_config("org/broken", environ=hub)


def test_a_hub_that_is_down(hub: dict[str, str]) -> None:
    with pytest.raises(MtpppError, match="HTTP 503"):
        find_config("org/down", environ=hub)


def test_a_hub_out_of_reach(tmp_path: Path) -> None:
    # Port 1 of the loopback interface: nothing listens there.
    environ = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path)}
    with pytest.raises(MtpppError, match="could not be fetched") as failed:
        find_config("org/open", environ=environ)
    assert failed.value.exit_status == 1


def test_offline(hub: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="HF_HUB_OFFLINE"):
        find_config("org/open", environ=hub | {"HF_HUB_OFFLINE": "1"})
    assert Hub.seen == []


def test_the_hash_ignores_who_wrote_the_file() -> None:
    other = {
        "torch_dtype": "bfloat16",
        "num_hidden_layers": 2,
        "model_type": "glm4_moe",
        "transformers_version": "5.12.0",
        "_name_or_path": "/data/model",
    }
    assert semantic_hash(CONFIG) == semantic_hash(other)
    assert semantic_hash(CONFIG) != semantic_hash(CONFIG | {"num_hidden_layers": 3})


def test_the_hash_ignores_how_a_value_is_written() -> None:
    plain = {"rope_parameters": {"rope_theta": 8000000}, "layers": [1, 2]}
    other = {
        "rope_parameters": {"rope_theta": 8000000.0, "factor": None},
        "layers": [1.0, 2],
        "index_topk_pattern": None,
    }
    assert semantic_hash(plain) == semantic_hash(other)
    assert semantic_hash(plain) != semantic_hash(plain | {"layers": [1, 2.5]})
    assert semantic_hash({"use_cache": True}) != semantic_hash({"use_cache": 1.5})


def test_the_hash_ignores_the_list_that_bundled_files_leave_out() -> None:
    bundled = find_config("zai-org/GLM-5.2-FP8", environ={}).values
    section = bundled["quantization_config"] | {"modules_to_not_convert": ["lm_head"]}
    assert semantic_hash(bundled | {"quantization_config": section}) == semantic_hash(bundled)


def test_differing_keys_are_named() -> None:
    assert differing_keys(CONFIG, CONFIG | {"transformers_version": "5"}) == ()
    other = {"model_type": "glm4_moe", "num_hidden_layers": 3, "dtype": "bfloat16", "vocab_size": 8}
    assert differing_keys(CONFIG, other) == ("num_hidden_layers", "vocab_size")


def test_the_hash_looks_into_nested_parts() -> None:
    one = {"text_config": {"dtype": "bfloat16", "hidden_size": 8}}
    same = {
        "text_config": {"torch_dtype": "bfloat16", "hidden_size": 8, "transformers_version": "5"}
    }
    assert semantic_hash(one) == semantic_hash(same)
    assert semantic_hash(one) != semantic_hash({"text_config": {"hidden_size": 8}})
