"""All that servers answered, in a directory: what a run was interrupted at is not asked again.

`manifest.json` says what the run is; `record.jsonl` has a line for each prompt, answer and score,
in the order in which they came:

    {"stage": "prompt", "key": "prose-0", "kind": "prose", "ids": [...]}
    {"stage": "candidate", "key": "prose-0", "tokens": [...], "finish": "length"}
    {"stage": "score/candidate", "key": "prose-0", "gap": [...], "rank": [...], "best": [...],
     "logprob": [...]}
    {"stage": "rest", "key": "prose-0", "mass": [...]}
    {"stage": "likeliest", "key": "prose-0", "positions": [[[7, -0.1], [9, -3.2], ...], ...]}
    {"stage": "note", "key": "...", "content": {...}}

Stages of answers are candidate, sampled, null, alone and again; the first four have one of scores,
and so have confirm/candidate, confirm/null, control, ruin, self and reverse. A stored baseline has
null, again and likeliest. The mass is the probability of what is none of the eight likeliest, at
each token of the sampled answer.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mtppp.engine.bulk import Answer, Scores
from mtppp.errors import ConfigurationError, MtpppError

SCHEMA = 1
MANIFEST = "manifest.json"
RECORD = "record.jsonl"

_DIGITS = 4  # of gaps and log probabilities, in nats


class Likeliest:
    """The likeliest tokens and their log probabilities (nats) at each position of an answer.

    A stored baseline may have a million positions; arrays take a fraction of what dictionaries do.
    """

    def __init__(self, positions: Iterable[Mapping[int, float]]) -> None:
        self._starts = array("l", [0])
        self._tokens = array("i")
        self._logprobs = array("d")
        for position in positions:
            self._tokens.extend(position.keys())
            self._logprobs.extend(position.values())
            self._starts.append(len(self._tokens))

    def __iter__(self) -> Iterator[dict[int, float]]:
        return map(self.at, range(len(self._starts) - 1))

    def at(self, position: int) -> dict[int, float]:
        """Token -> log probability, nats."""
        start, end = self._starts[position : position + 2]
        return dict(zip(self._tokens[start:end], self._logprobs[start:end], strict=True))


NOT_SCORED = Likeliest(())
"""Of an answer without tokens."""


class Record:
    """The record of one run; new, or continued.

    Attributes:
        prompts: key -> (kind, token ids).
        answers: stage -> key -> answer.
        scores: stage -> key -> scores.
        likeliest: key -> for each token of the null's answer, the likeliest ones there and their
            log probabilities, nats.
        rest: key -> for each token of the sampled answer, the probability of all that are none of
            the likeliest there.
        notes: key -> whatever was noted.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.prompts: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.answers: dict[str, dict[str, Answer]] = {}
        self.scores: dict[str, dict[str, Scores]] = {}
        self.likeliest: dict[str, Likeliest] = {}
        self.rest: dict[str, list[float]] = {}
        self.notes: dict[str, dict[str, Any]] = {}

    @classmethod
    def open(cls, directory: Path, manifest: Mapping[str, Any]) -> Record:
        """Begin a record, or go on with the one that is there.

        Raises:
            ConfigurationError: the directory holds the record of another run.
        """
        record = cls(directory)
        file = directory / MANIFEST
        if file.exists():
            there = _read_json(file)
            differs = [key for key in manifest if there.get(key) != manifest[key]]
            if differs:
                raise ConfigurationError(
                    f"{directory} holds another run: {', '.join(differs)} differ",
                    hint="give another directory with -o, or the same arguments to go on with it",
                )
            record._read()
        else:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
            except OSError as error:
                raise ConfigurationError(f"{directory}: {error.strerror}") from None
        return record

    @classmethod
    def read(cls, directory: Path) -> tuple[Record, dict[str, Any]]:
        """A record that was made before, and its manifest.

        Raises:
            ConfigurationError: there is none, or it is of another version.
        """
        manifest = manifest_of(directory)
        record = cls(directory)
        record._read()
        return record, manifest

    def add_prompt(self, key: str, kind: str, ids: tuple[int, ...]) -> None:
        self.prompts[key] = (kind, ids)
        self._append({"stage": "prompt", "key": key, "kind": kind, "ids": ids})

    def add_answer(self, stage: str, key: str, answer: Answer) -> None:
        self.answers.setdefault(stage, {})[key] = answer
        entry = {"stage": stage, "key": key, "tokens": answer.tokens, "finish": answer.finish}
        self._append(entry)

    def add_scores(self, stage: str, key: str, scores: Scores) -> None:
        self.scores.setdefault(stage, {})[key] = scores
        self._append(
            {
                "stage": f"score/{stage}",
                "key": key,
                "gap": [round(gap, _DIGITS) for gap in scores.gap],
                "rank": scores.rank.tolist(),
                "best": scores.best.tolist(),
                "logprob": [round(logprob, _DIGITS) for logprob in scores.logprob],
            }
        )

    def add_likeliest(self, key: str, positions: list[dict[int, float]]) -> None:
        self.likeliest[key] = Likeliest(positions)
        kept = [
            [[token, round(logprob, _DIGITS)] for token, logprob in position.items()]
            for position in positions
        ]
        self._append({"stage": "likeliest", "key": key, "positions": kept})

    def add_rest(self, key: str, mass: list[float]) -> None:
        self.rest[key] = mass
        rounded = [float(f"{one:.4g}") for one in mass]
        self._append({"stage": "rest", "key": key, "mass": rounded})

    def note(self, key: str, content: Mapping[str, Any]) -> None:
        """Keep something else that was found out."""
        self.notes[key] = dict(content)
        self._append({"stage": "note", "key": key, "content": content})

    def _append(self, entry: Mapping[str, Any]) -> None:
        path = self.directory / RECORD
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, separators=(",", ":")) + "\n")
        except OSError as error:
            raise MtpppError(
                f"{path}: {error.strerror}",
                hint="mend that and run the same again: it goes on from what is there",
            ) from None

    def _read(self) -> None:
        file = self.directory / RECORD
        if not file.exists():
            return
        try:
            with file.open("rb") as lines:
                whole = self._take_all(lines)
            if whole != file.stat().st_size:
                with file.open("rb+") as half:
                    half.truncate(whole)
        except OSError as error:
            raise ConfigurationError(f"{file}: {error.strerror}") from None

    def _take_all(self, lines: BinaryIO) -> int:
        """Bytes of whole lines; an interrupted run may have left half of one."""
        whole = 0
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break
            try:
                self._take(json.loads(line))
            except (
                *(ValueError, LookupError, TypeError, AttributeError),
                *(OverflowError, RecursionError),
            ):
                raise ConfigurationError(
                    f"{self.directory / RECORD}:{number}: not a line of a record",
                    hint="the file was changed; begin anew in another directory",
                ) from None
            whole += len(line)
        return whole

    def _take(self, entry: dict[str, Any]) -> None:
        stage, key = entry["stage"], entry["key"]
        if stage == "prompt":
            self.prompts[key] = (entry["kind"], tuple(entry["ids"]))
        elif stage == "likeliest":
            self.likeliest[key] = Likeliest(map(dict, entry["positions"]))
        elif stage == "rest":
            self.rest[key] = entry["mass"]
        elif stage == "note":
            self.notes[key] = entry["content"]
        elif stage.startswith("score/"):
            self.scores.setdefault(stage.removeprefix("score/"), {})[key] = Scores(
                array("d", entry["gap"]),
                array("l", entry["rank"]),
                array("l", entry["best"]),
                array("d", entry["logprob"]),
            )
        else:
            answer = Answer(tuple(entry["tokens"]), entry["finish"])
            self.answers.setdefault(stage, {})[key] = answer


def manifest_of(directory: Path) -> dict[str, Any]:
    """What a record is of, without reading it.

    Raises:
        ConfigurationError: there is none, or it is of another version.
    """
    manifest = _read_json(directory / MANIFEST)
    if missing := [key for key in ("tier", "prompts", "prompts_sha256") if key not in manifest]:
        raise ConfigurationError(f"{directory / MANIFEST} does not tell {', '.join(missing)}")
    return manifest


def _read_json(file: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigurationError(
            f"{file.parent} holds no record of mtppp", hint=f"there is no readable {file.name}"
        ) from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise ConfigurationError(f"{file}: schema {manifest.get('schema')!r} is not {SCHEMA}")
    return manifest
