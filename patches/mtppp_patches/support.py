"""Which deployments are proven to be right, and which are refused, with the reason.

One file, support.json, says it for plugin, launcher, command and documentation. Per release and
family (`model_type`) it records the drafter's class, whether decoding is right as vLLM ships it
("native"), right with our patches ("patched") or wrong ("broken"), and what proves it. Standard
library only.

A family without a row on a release is refused there. With one, a deployment is allowed when

- the family's decoding with MTP has engine evidence on that release. It may come from another
  family that decodes on the same path (`Evidence.on`); and
- each patch of scope "model" that it needs has at least class evidence on that release, and where
  its layers share sparse-attention indices, so has the refusal of cuts between them; and
- it is none of the combinations that are refused whatever the family.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from mtppp_patches import index_share
from mtppp_patches.engine_spec import EngineSpec
from mtppp_patches.patch import names_needed
from mtppp_patches.registry import PATCHES
from mtppp_patches.releases import RELEASES, releases

Level = Literal["read", "config", "class", "engine"]
"""What was done, weakest first: sources read; real configuration classes made; what a patch changes
or leans on in the real model classes run, in a process group where ranks have a part in it; a real
engine run and its tokens scored by another."""

Decode = Literal["native", "patched", "broken"]

DECODE = "decode"
"""The key of the evidence for decoding as a whole; the others are names of patches."""

IN_PLACE = "in place"
IN_PLACE_MEANS = (
    "it was on every rank of engines whose tokens were right; what it refuses, counts or tells was "
    "not shown there, but by tests on one or two releases"
)
"""How tables call what was shown of a patch of which no more was."""

_SCHEMA = 1
# Models whose layers share sparse-attention indices, and whose expert layers leave their output to
# be summed later.
_SPARSE = frozenset({"glm_moe_dsa", "deepseek_v32", "dots3_note"})
# Models whose drafters do not load the model's embedding, and have no patch for it: by the name in
# config.json, and in its text part.
_WITHOUT_EMBEDDING = frozenset(
    {
        "glm4_moe_lite",
        "pangu_ultra_moe",
        "kimi_k3",
        "kimi_linear",
        "inkling_mm_model",
        "inkling_model",
    }
)


@dataclass(frozen=True)
class Evidence:
    """One thing that was shown.

    Attributes:
        on: model_type of the model it was shown with.
        date: ISO date.
        record: file of results in the repository, or the command.
    """

    level: Level
    on: str
    date: str
    record: str

    def for_family(self, model_type: str) -> str:
        """What a reader of this family's row is to know: `class`, `engine of deepseek_v3`."""
        return self.level if self.on == model_type else f"{self.level} of {self.on}"

    def at_least(self, level: Level) -> bool:
        """Whether this is as strong as `level`."""
        order = get_args(Level)
        return order.index(self.level) >= order.index(level)


@dataclass(frozen=True)
class Family:
    """A family of models on one release.

    Attributes:
        drafter: the class that drafts, "module:class".
        evidence: by name of patch, of those that `must_be_proven` for this family or are right as
            vLLM ships them, and under `DECODE` for decoding as a whole, its patches included.
        note: anything a reader should know; "" for nothing.
    """

    model_type: str
    drafter: str
    decode: Decode
    evidence: Mapping[str, Evidence]
    note: str = ""

    def proves(self, key: str, level: Level) -> bool:
        """Whether there is evidence for `key` of at least `level`."""
        found = self.evidence.get(key)
        return found is not None and found.at_least(level)


@dataclass(frozen=True)
class Refusal:
    """Why a deployment is refused, and what to do instead.

    Attributes:
        overridable: whether naming `code` in the cluster file goes ahead at one's own risk.
    """

    code: str
    reason: str
    way_out: str
    overridable: bool


@dataclass(frozen=True)
class _Span:
    """What is said of releases that follow each other.

    Attributes:
        first, last: releases, both included.
    """

    first: str
    last: str

    @property
    def releases(self) -> tuple[str, ...]:
        return releases(self.first, self.last)


@dataclass(frozen=True)
class OtherMethods(_Span):
    """What speculative methods other than MTP do under pipeline parallelism, by reading."""

    methods: tuple[str, ...]
    does: str

    def covers(self, method: str, release: str) -> bool:
        """Whether this is about `method` on `release`."""
        return method in self.methods and release in self.releases


@dataclass(frozen=True)
class Shown:
    """How far a patch itself was shown on some releases, whatever the family.

    Attributes:
        level: "engine": it was in place on every rank of engines whose tokens were right.
        record: file of results in the repository, with a placeholder for the release.
        in_place: nothing more than that: what it refuses, counts or tells was not shown there.
    """

    patch: str
    level: Level
    releases: tuple[str, ...]
    record: str
    in_place: bool = False

    @property
    def label(self) -> str:
        """What a reader of tables is to know."""
        return IN_PLACE if self.in_place else self.level


@dataclass(frozen=True)
class NotShown(_Span):
    """What could not be shown, and why.

    Attributes:
        families: values of model_type; () means all.
    """

    families: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Limit(_Span):
    """What works otherwise with MTP over stages than without stages."""

    what: str


@dataclass(frozen=True)
class Support:
    """support.json.

    Attributes:
        updated: ISO date of the last change.
        releases: release -> model_type -> family.
        refusals: code -> refusal, its texts with placeholders for `str.format`.
    """

    updated: str
    releases: Mapping[str, Mapping[str, Family]]
    refusals: Mapping[str, Refusal]
    other_methods: tuple[OtherMethods, ...] = ()
    patches: tuple[Shown, ...] = ()
    not_shown: tuple[NotShown, ...] = ()
    limits: tuple[Limit, ...] = ()

    def shown(self, patch: str, release: str) -> Shown:
        """How far a patch was shown on one of its releases; "read", without a record, where its
        sources were only read."""
        found = [row for row in self.patches if row.patch == patch and release in row.releases]
        if not found:
            return Shown(patch, "read", (release,), "")
        best = max(found, key=lambda row: get_args(Level).index(row.level))
        return replace(best, releases=(release,), record=best.record.format(release=release))

    def why_not_shown(self, release: str, model_type: str | None) -> str:
        """Why a family, or every one, has no row on a release; "" where nobody has tried."""
        for row in self.not_shown:
            if release in row.releases and (not row.families or model_type in row.families):
                return row.why
        return ""


@dataclass(frozen=True)
class Verdict:
    """Whether a deployment may run.

    Attributes:
        refusals: what stands in the way; empty when allowed.
        at_own_risk: refusals that the cluster file overrides.
        patches: names of the patches it needs.
        evidence: of decoding, and of those patches that `must_be_proven`.
    """

    refusals: tuple[Refusal, ...]
    at_own_risk: tuple[Refusal, ...]
    patches: tuple[str, ...]
    evidence: Mapping[str, Evidence]

    @property
    def allowed(self) -> bool:
        return not self.refusals

    @property
    def reason(self) -> str:
        return "; ".join(refusal.reason for refusal in self.refusals)

    @property
    def way_out(self) -> str:
        return "; ".join(dict.fromkeys(refusal.way_out for refusal in self.refusals))


def span(found: Sequence[str]) -> str:
    """Releases that follow each other, in words: "0.23.0", "0.23.0 to 0.33.0"."""
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def in_spans(shown: Mapping[str, str]) -> str:
    """How far a patch was shown, release by release, in words.

    Args:
        shown: release -> its label, in order.
    """
    spans = [(label, [*found]) for label, found in itertools.groupby(shown, key=shown.get)]
    return ", ".join(f"{label} ({span(found)})" for label, found in spans)


@cache
def support() -> Support:
    """The data of support.json.

    Raises:
        ValueError: the file is of another schema or malformed.
    """
    return parse(Path(__file__).with_name("support.json").read_text(encoding="utf-8"))


def parse(text: str) -> Support:
    """Read what support.json holds.

    Raises:
        ValueError: naming what is wrong and where.
    """
    data = json.loads(text)
    if data.get("schema") != _SCHEMA:
        raise ValueError(f"support.json is not of schema {_SCHEMA}")
    if unknown := sorted(set(data["releases"]) - set(RELEASES)):
        raise ValueError(f"unknown releases: {', '.join(unknown)}")
    return Support(
        updated=data["updated"],
        releases={
            release: {
                model_type: _family(f"{release}.{model_type}", model_type, row)
                for model_type, row in families.items()
            }
            for release, families in data["releases"].items()
        },
        refusals={code: Refusal(code=code, **row) for code, row in data["refusals"].items()},
        other_methods=tuple(
            OtherMethods(**row | {"methods": tuple(row["methods"])})
            for row in data["other_methods"]
        ),
        patches=tuple(
            Shown(**row | {"releases": tuple(row["releases"])}) for row in data["patches"]
        ),
        not_shown=tuple(
            NotShown(**row | {"families": tuple(row["families"])}) for row in data["not_shown"]
        ),
        limits=tuple(Limit(**row) for row in data["limits"]),
    )


def admissible(spec: EngineSpec, data: Support | None = None) -> Verdict:
    """Decide whether `spec` may run; its own `patches` are not looked at."""
    data = data or support()
    patches = names_needed(PATCHES, spec)
    family = data.releases.get(spec.release, {}).get(spec.model_type)
    found = [
        _filled(data, code, spec, patches, family)
        for code, applies in _CONDITIONS.items()
        if applies(spec, patches, family)
    ]
    overridden = [r for r in found if r.overridable and r.code in spec.at_own_risk]
    # What vLLM does with one stage is not what was shown.
    evidence = family.evidence if family and spec.pipeline > 1 else {}
    return Verdict(
        refusals=tuple(refusal for refusal in found if refusal not in overridden),
        at_own_risk=tuple(overridden),
        patches=patches,
        evidence={key: evidence[key] for key in (DECODE, *patches) if key in evidence},
    )


_OF_MODEL = frozenset(patch.name for patch in PATCHES if patch.scope == "model")


def must_be_proven(patch: str, model_type: str) -> bool:
    """Whether a family that needs this patch needs evidence of its own for it. Pure."""
    return patch in _OF_MODEL or (patch == index_share.PATCH.name and model_type in _SPARSE)


_Condition = Callable[[EngineSpec, tuple[str, ...], Family | None], bool]


def _pipelines_mtp(spec: EngineSpec) -> bool:
    return spec.pipeline > 1 and spec.mtp


def _unproven(patches: Iterable[str], family: Family) -> list[str]:
    return [
        patch
        for patch in patches
        if must_be_proven(patch, family.model_type) and not family.proves(patch, "class")
    ]


_CONDITIONS: Mapping[str, _Condition] = {
    "unknown_release": lambda spec, patches, family: (
        spec.pipeline > 1 and spec.release not in RELEASES
    ),
    "unlisted_family": lambda spec, patches, family: (
        spec.pipeline > 1 and spec.release in RELEASES and family is None
    ),
    "unproven_decode": lambda spec, patches, family: (
        _pipelines_mtp(spec)
        and family is not None
        and (family.decode == "broken" or not family.proves(DECODE, "engine"))
    ),
    "unproven_patch": lambda spec, patches, family: (
        family is not None and bool(_unproven(patches, family))
    ),
    "drafter_embedding": lambda spec, patches, family: (
        _pipelines_mtp(spec) and spec.model_type in _WITHOUT_EMBEDDING
    ),
    "v1_runner": lambda spec, patches, family: _pipelines_mtp(spec) and spec.runner == "v1",
    "sync_scheduling": lambda spec, patches, family: (
        _pipelines_mtp(spec) and not spec.async_scheduling
    ),
    "speculative_method": lambda spec, patches, family: (
        spec.pipeline > 1 and spec.speculative is not None and not spec.mtp
    ),
    "other_classes": lambda spec, patches, family: spec.pipeline > 1 and spec.other_classes,
    "expert_data_parallel": lambda spec, patches, family: (
        spec.model_type in _SPARSE
        and spec.expert_parallel
        and max(spec.data_parallel, spec.prefill_context) > 1
        and min(spec.tensor, spec.pipeline) > 1
    ),
    "unproven_parallelism": lambda spec, patches, family: (
        spec.pipeline > 1
        and (
            spec.expert_parallel
            or max(spec.data_parallel, spec.prefill_context, spec.decode_context) > 1
        )
    ),
    "eplb_pipeline": lambda spec, patches, family: spec.eplb and spec.pipeline > 1,
    "eplb_mtp": lambda spec, patches, family: spec.eplb and spec.mtp,
}
"""Code -> whether the refusal applies, given the patches needed and the family's row."""


def _filled(
    data: Support, code: str, spec: EngineSpec, patches: tuple[str, ...], family: Family | None
) -> Refusal:
    method = spec.speculative.method if spec.speculative else ""
    does = [row.does for row in data.other_methods if row.covers(method, spec.release)]
    values = {
        "release": spec.release,
        "releases": ", ".join(RELEASES),
        "model_type": spec.model_type,
        "method": method,
        "does": "; ".join(does) or "not proven",
        "patches": ", ".join(_unproven(patches, family)) if family else "",
    }
    refusal = data.refusals[code]
    return Refusal(
        code,
        refusal.reason.format(**values),
        refusal.way_out.format(**values),
        refusal.overridable,
    )


def _family(where: str, model_type: str, row: dict[str, Any]) -> Family:
    unknown = [
        key for key in row["evidence"] if key != DECODE and not must_be_proven(key, model_type)
    ]
    if unknown:
        raise ValueError(f"{where}: evidence for what is no patch of a model: {', '.join(unknown)}")
    if row["decode"] not in get_args(Decode):
        raise ValueError(f"{where}: decode {row['decode']!r} is none of {get_args(Decode)}")
    evidence = {key: Evidence(**value) for key, value in row["evidence"].items()}
    for key, item in evidence.items():
        if item.level not in get_args(Level):
            raise ValueError(f"{where}.{key}: level {item.level!r} is none of {get_args(Level)}")
    return Family(model_type, row["drafter"], row["decode"], evidence, row.get("note", ""))
