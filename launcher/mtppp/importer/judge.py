"""What the model makes of a draft: what it needs, what would be wrong, what does not fit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtppp.cluster import Cluster, parse
from mtppp.errors import ConfigurationError, MtpppError, Refused
from mtppp.gpus import GPU_TYPES, GpuType
from mtppp.importer.draft import Draft
from mtppp.model.facts import ModelFacts
from mtppp.model.parallelism import draft_problems, gpu_problems, parallel_problems
from mtppp.plan.build import engine_spec, serving
from mtppp.plan.costs import best_cut, largest_max_model_len
from mtppp.plan.memory import DEFAULT_UTILISATION, Gpu, memory_report
from mtppp.plan.partition import check_partition, nearest_legal, vllm_default
from mtppp.runtime.lock import has_lock
from mtppp_patches.engine_spec import EngineSpec
from mtppp_patches.registry import PATCHES
from mtppp_patches.releases import RELEASES
from mtppp_patches.support import Verdict, admissible, support

HOPPER = (9, 0)
MOST_DRAFTS_ON_HOPPER = 3
_ROUND = 1024
_WAY_OUT = "choose other parallel sizes; `mtppp model inspect` shows what the model is made of"


@dataclass(frozen=True)
class Judged:
    """A draft, judged.

    Attributes:
        verdict: whether `mtppp launch` would go ahead; None where the model is not known.
        partition: the layers of each stage that `auto` comes to; None where that is not known.
    """

    draft: Draft
    verdict: Verdict | None
    partition: tuple[int, ...] | None = None


def default_release() -> str:
    """vLLM's release where nobody says one.

    The newest that something was proven on, of those that mtppp can install on the nodes.
    """
    proven = [release for release in RELEASES if release in support().releases]
    installable = [release for release in proven if has_lock(release, "cuda")]
    return (installable or proven or RELEASES)[-1]


def judge(draft: Draft, facts: ModelFacts | None, file: Path) -> Judged:
    """Complete the draft with what its model needs, and note everything a person must know.

    Args:
        facts: of the model; None where its config.json could not be had.
        file: what the cluster file will be called, for messages.

    Raises:
        Refused: there can be no such deployment.
        ConfigurationError: the draft makes no valid file.
    """
    refuse_obstacles(draft)
    gpu = GPU_TYPES[draft.gpu_type] if draft.gpu_type else None
    if facts is None:
        parse(draft.text(), file)
        return Judged(draft, None)
    _structure(draft, facts, gpu)
    refuse_obstacles(draft)
    _partition(draft, facts)
    _drafts(draft, facts, gpu)
    _balancing(draft)
    verdict = _release(draft, facts, file)
    _experts(draft)
    _memory(draft, facts, gpu, file)
    refuse_obstacles(draft)
    cluster = parse(draft.text(), file).cluster
    return Judged(draft, verdict, _chosen_cut(draft, facts, gpu, cluster))


def refuse_obstacles(draft: Draft) -> None:
    """Raises Refused with every obstacle of the draft."""
    if not draft.obstacles:
        return
    first, *others = draft.obstacles
    raise Refused(
        first.reason,
        details=[f"{obstacle.reason}; instead: {obstacle.way_out}" for obstacle in others],
        hint=first.way_out,
    )


def _structure(draft: Draft, facts: ModelFacts, gpu: GpuType | None) -> None:
    """Sizes that do not divide, drafts the model has no layer for, GPUs that lack a kernel."""
    expert = draft.tensor if draft.args.get("enable-expert-parallel") else None
    problems = [
        *parallel_problems(facts, tensor=draft.tensor, pipeline=draft.pipeline, expert=expert),
        *draft_problems(facts, draft.tokens),
        *(gpu_problems(facts, _capability(gpu)) if gpu else ()),
    ]
    for problem in problems:
        draft.cannot(problem.message, _WAY_OUT)


def _partition(draft: Draft, facts: ModelFacts) -> None:
    if draft.pipeline == 1:
        draft.partition = None
        return
    default = vllm_default(facts.layer_count, draft.pipeline)
    counts = draft.partition or default
    if len(counts) != draft.pipeline or sum(counts) != facts.layer_count:
        raise ConfigurationError(
            f"VLLM_PP_LAYER_PARTITION={','.join(map(str, counts))} has {sum(counts)} layers over "
            f"{len(counts)} stages; the model has {facts.layer_count}, the command "
            f"{draft.pipeline} stages",
            hint="leave it out: mtppp finds a partition",
        )
    violations = check_partition(counts, facts.layer_count, facts.couplings)
    if not violations:
        return
    legal = " or ".join(
        "/".join(map(str, near))
        for near in nearest_legal(counts, facts.layer_count, facts.couplings)
    )
    said = "/".join(map(str, counts))
    whose = "this" if draft.partition else f"vLLM's own cut {said}"
    draft.comments["parallel", "layer_partition"] = (
        f"auto never cuts a group of layers that share indices, as {said} does"
        if facts.sparse
        else f"auto never cuts coupled layers apart, as {said} does"
    )
    draft.note(
        "changed",
        f"layers {said}",
        f"{whose} is illegal: {violations[0]}. layer_partition is auto"
        + (f"; legal near it: {legal}" if legal else ""),
    )
    draft.partition = None


def _drafts(draft: Draft, facts: ModelFacts, gpu: GpuType | None) -> None:
    is_hopper = gpu is None or _capability(gpu)[0] == HOPPER[0]
    if not facts.sparse or draft.tokens in (0, 1, MOST_DRAFTS_ON_HOPPER) or not is_hopper:
        return
    k = draft.tokens
    draft.comments["speculative", "tokens"] = "on Hopper GPUs 3 is faster"
    draft.note(
        "warning",
        f"num_speculative_tokens {k}",
        "on Hopper GPUs the sparse indexer has a fast path for 1 and 3 draft tokens only; "
        f"{k} reads the KV cache {k + 1} times a step. Set speculative.tokens to 3 there",
    )


def _balancing(draft: Draft) -> None:
    if not draft.args.get("enable-eplb") or (draft.pipeline == 1 and not draft.tokens):
        return
    del draft.args["enable-eplb"]
    draft.args.pop("eplb-config", None)
    refusal = support().refusals["eplb_pipeline" if draft.pipeline > 1 else "eplb_mtp"]
    draft.note("changed", "--enable-eplb", f"left out: {refusal.reason}")


def _experts(draft: Draft) -> None:
    if draft.args.get("enable-expert-parallel") and draft.pipeline > 1:
        draft.note(
            "warning",
            "--enable-expert-parallel",
            "kept; with one engine it spreads whole experts over the ranks of a stage and changes "
            "no memory: leave it out unless you have measured that it is faster",
        )


def _release(draft: Draft, facts: ModelFacts, file: Path) -> Verdict:
    """Settle the release, and say what `launch` makes of the combination on it."""
    cluster = parse(draft.text(), file).cluster
    spec = engine_spec(cluster, family=facts.model_type)
    verdict = admissible(spec)
    if not verdict.allowed and draft.release_from != "wish":
        better = _admissible_release(cluster, facts)
        if better is not None:
            _change_release(draft, better, verdict)
            cluster = parse(draft.text(), file).cluster
            spec = engine_spec(cluster, family=facts.model_type)
            verdict = admissible(spec)
    for refusal in verdict.refusals:
        draft.note(
            "refused",
            f"vLLM {draft.vllm}",
            f"`mtppp launch` refuses this today: {refusal.reason}. {_sentence(refusal.way_out)}",
        )
    _patches(draft, spec, verdict)
    return verdict


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _admissible_release(cluster: Cluster, facts: ModelFacts) -> str | None:
    for release in (default_release(), *reversed(RELEASES)):
        runtime = cluster.runtime.model_copy(update={"vllm": release})
        other = cluster.model_copy(update={"runtime": runtime})
        if admissible(engine_spec(other, family=facts.model_type)).allowed:
            return release
    return None


def _change_release(draft: Draft, release: str, verdict: Verdict) -> None:
    if draft.release_from == "image":
        draft.note(
            "changed",
            f"vLLM {draft.vllm}",
            f"{release}, because on {draft.vllm} {verdict.reason}",
        )
    draft.vllm = release


def _patches(draft: Draft, spec: EngineSpec, verdict: Verdict) -> None:
    """What changes tokens; where ranks run, and what they attest, is the same for everybody."""
    for patch in PATCHES:
        if patch.name in verdict.patches and patch.scope != "deployment":
            draft.note("needs", f"patch {patch.name}", f"on vLLM {spec.release}: {patch.why}")


def _memory(draft: Draft, facts: ModelFacts, gpu: GpuType | None, file: Path) -> None:
    given = draft.args.get("max-model-len")
    if gpu is None:
        if given is None and facts.context:
            draft.note(
                "warning",
                "max-model-len",
                f"not given, so {facts.context:,} tokens, the model's own; whether they fit was "
                "not looked at (say which GPUs: --gpu H100-80GB)",
            )
        return
    largest = _largest(draft, facts, gpu, file)
    if largest is None:
        return
    where = f"{draft.tensor * draft.pipeline} x {draft.gpu_type}"
    if largest < _ROUND:
        draft.cannot(
            f"the model does not fit into {where}"
            + (f": {_size(facts)} of weights" if facts.checkpoint_bytes else ""),
            "more GPUs: raise tensor or pipeline parallelism, or add nodes",
        )
    elif given is None and facts.context and largest < facts.context:
        length = largest // _ROUND * _ROUND
        draft.args["max-model-len"] = length
        draft.comments["serve", "args", "max-model-len"] = (
            f"the largest that fits; the model's own {facts.context} does not"
        )
        draft.note(
            "changed",
            "max-model-len",
            f"{length}: the model's own {facts.context:,} tokens do not fit into {where}",
        )
    elif isinstance(given, int) and given > largest:
        draft.cannot(
            f"max-model-len {given} does not fit into {where}", f"--max-model-len {largest}"
        )


def _size(facts: ModelFacts) -> str:
    return f"{(facts.checkpoint_bytes or 0) / 2**30:.0f} GiB"


def _largest(draft: Draft, facts: ModelFacts, gpu: GpuType, file: Path) -> int | None:
    """The largest max-model-len that fits; None where that cannot be calculated, or any does."""
    cluster = parse(draft.text(), file).cluster
    gpus = _gpus(draft, gpu)
    try:
        if draft.partition or draft.pipeline == 1:
            counts = draft.partition or (facts.layer_count,)
            report = memory_report(facts, counts, serving(cluster), gpus)
            return report.largest_max_model_len if report.fits else 0
        return largest_max_model_len(facts, serving(cluster), gpus)
    except ConfigurationError as error:
        draft.note("warning", "memory", f"not looked at: {error.message}")
        return None


def _gpus(draft: Draft, gpu: GpuType) -> Sequence[Gpu]:
    utilisation = float(draft.args.get("gpu-memory-utilization", DEFAULT_UTILISATION))
    return [Gpu(gpu.memory, utilisation)] * draft.pipeline


def _chosen_cut(
    draft: Draft, facts: ModelFacts, gpu: GpuType | None, cluster: Cluster
) -> tuple[int, ...] | None:
    if draft.partition or draft.pipeline == 1 or gpu is None:
        return draft.partition
    try:
        return tuple(best_cut(facts, serving(cluster), _gpus(draft, gpu)).counts)
    except MtpppError:
        return None


def _capability(gpu: GpuType) -> tuple[int, int]:
    major, _, minor = gpu.compute_capability.partition(".")
    return int(major), int(minor)


def release_of(minimum: str) -> str | None:
    """The first known release that is not older than `minimum`."""
    wanted = _numbers(minimum)
    return next((release for release in RELEASES if _numbers(release) >= wanted), None)


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:3])
