"""Finds a model's config.json: here, in the catalogue, in a cache, on the hub.

The operator's side needs no transformers: the file is read as JSON, and nothing in it is run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx

from mtppp.errors import ConfigurationError, MtpppError

CONFIG = "config.json"
CATALOGUE = "catalogue"
HUB = "https://huggingface.co"
TIMEOUT = httpx.Timeout(30.0, connect=10.0)

VOLATILE = frozenset({"transformers_version", "_name_or_path", "modules_to_not_convert"})
"""Keys that do not tell models apart: what wrote the file, and where; and the list, thousands of
names long in some files, of modules that a checkpoint left unquantised, which bundled files leave
out. A checkpoint that contradicts that list does not load."""


@dataclass(frozen=True)
class ModelConfig:
    """A parsed config.json and where it came from.

    Attributes:
        values: as parsed.
        origin: for people: "file", "catalogue", "cache" or "hub", and where.
        directory: the local directory with the checkpoint's other files; None without one.
    """

    values: Mapping[str, Any]
    origin: str
    directory: Path | None

    @property
    def digest(self) -> str:
        """The semantic hash: equal for copies that describe the same model."""
        return semantic_hash(self.values)


def semantic_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of what the configuration means, in canonical JSON.

    Equal for files that differ in `VOLATILE` keys, in keys that are null, in writing 8000000 as
    8000000.0, or in calling `dtype` by its former name `torch_dtype`; in nested parts likewise.
    """
    text = json.dumps(_meaning(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def differing_keys(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """Top-level keys in which two configurations mean different things, sorted."""
    first, second = _meaning(one), _meaning(other)
    return tuple(
        sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))
    )


def _meaning(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_meaning(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    meaning = {
        key: _meaning(entry)
        for key, entry in value.items()
        if key not in VOLATILE and key != "torch_dtype" and entry is not None
    }
    if value.get("torch_dtype") is not None:
        meaning.setdefault("dtype", value["torch_dtype"])
    return meaning


def find_config(
    model: str,
    *,
    revision: str | None = None,
    environ: Mapping[str, str] | None = None,
    client: httpx.Client | None = None,
) -> ModelConfig:
    """The configuration of `model`, from the nearest place that has it.

    In order: a file or directory of that name; the bundled catalogue (only without a revision);
    the Hugging Face cache; the hub.

    Args:
        model: a path, or a hub id such as `zai-org/GLM-5.2-FP8`.
        revision: branch, tag or commit on the hub; None: `main`.
        environ: HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN; None: this process's.
        client: for the hub; None: one of its own.

    Raises:
        ConfigurationError: no such file, or it is no JSON object, or the hub has no such model.
        MtpppError: the hub could not be reached.
    """
    environment = os.environ if environ is None else environ
    path = Path(model).expanduser()
    if path.exists():
        return _from_path(path)
    if not is_hub_id(model):
        raise ConfigurationError(
            f"{model}: no such file or directory, and no hub id",
            hint="a hub id has the form ORGANISATION/NAME",
        )
    bundled = _from_catalogue(model) if revision is None else None
    if bundled is not None:
        return bundled
    cached = _from_cache(model, revision, environment)
    if cached is not None:
        return cached
    if _is_true(environment.get("HF_HUB_OFFLINE")):
        raise ConfigurationError(
            f"{model}: not in the catalogue nor in {cache_directory(environment)}, "
            "and HF_HUB_OFFLINE is set",
            hint="give the path of its config.json, or unset HF_HUB_OFFLINE",
        )
    if client is not None:
        return _from_hub(model, revision, environment, client)
    with httpx.Client(timeout=TIMEOUT) as own:
        return _from_hub(model, revision, environment, own)


def is_hub_id(model: str) -> bool:
    parts = model.split("/")
    return len(parts) == 2 and all(part and part not in {".", "..", "~"} for part in parts)


def parse_config(text: str, origin: str) -> Mapping[str, Any]:
    """The JSON object in `text`.

    Raises:
        ConfigurationError: there is none; `origin` is named.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{origin}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{origin}: a JSON {type(values).__name__}, not an object")
    return values


def _from_path(path: Path) -> ModelConfig:
    file = path / CONFIG if path.is_dir() else path
    return _read(file, f"file {file}")


def _read(file: Path, origin: str) -> ModelConfig:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{file.parent} has no {CONFIG}", hint="is it a model's directory?"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}: cannot be read: {error}") from error
    return ModelConfig(parse_config(text, str(file)), origin, file.parent)


def catalogue() -> tuple[str, ...]:
    """Hub ids whose config.json mtppp brings along, sorted."""
    root = files("mtppp.model") / CATALOGUE
    return tuple(sorted(entry.name.replace("--", "/", 1) for entry in root.iterdir()))


def _from_catalogue(model: str) -> ModelConfig | None:
    entry = files("mtppp.model") / CATALOGUE / model.replace("/", "--", 1) / CONFIG
    if not entry.is_file():
        return None
    origin = f"catalogue {model}"
    return ModelConfig(parse_config(entry.read_text(encoding="utf-8"), origin), origin, None)


def cache_directory(environ: Mapping[str, str]) -> Path:
    """The hub cache, where huggingface_hub looks for it."""
    if environ.get("HF_HUB_CACHE"):
        return Path(environ["HF_HUB_CACHE"]).expanduser()
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"]).expanduser() / "hub"
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def _from_cache(model: str, revision: str | None, environ: Mapping[str, str]) -> ModelConfig | None:
    repository = cache_directory(environ) / f"models--{model.replace('/', '--')}"
    name = revision or "main"
    reference = repository / "refs" / name
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else name
    file = repository / "snapshots" / commit / CONFIG
    return _read(file, f"cache {file}") if file.is_file() else None


def _from_hub(
    model: str, revision: str | None, environ: Mapping[str, str], client: httpx.Client
) -> ModelConfig:
    endpoint = (environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    url = f"{endpoint}/{model}/resolve/{revision or 'main'}/{CONFIG}"
    token = environ.get("HF_TOKEN")
    try:
        answer = client.get(
            url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            follow_redirects=True,
        )
    except httpx.HTTPError as error:
        raise MtpppError(
            f"{model}: {url} could not be fetched: {error}",
            hint="give the path of its config.json, or set HF_ENDPOINT to a mirror",
        ) from error
    if answer.status_code in {401, 403}:
        raise ConfigurationError(
            f"{model}: {endpoint} wants a token that may read it (HTTP {answer.status_code})",
            hint="set HF_TOKEN" if not token else "HF_TOKEN is set, but not granted this model",
        )
    if answer.status_code == 404:
        raise ConfigurationError(
            f"{model}: {endpoint} has no {CONFIG} for it at revision {revision or 'main'}",
            hint="check the id and the revision",
        )
    if not answer.is_success:
        raise MtpppError(
            f"{model}: {url} answered HTTP {answer.status_code}",
            hint="give the path of its config.json",
        )
    return ModelConfig(parse_config(answer.text, url), f"hub {url}", None)


def _is_true(value: str | None) -> bool:
    return (value or "").upper() in {"1", "ON", "YES", "TRUE"}
