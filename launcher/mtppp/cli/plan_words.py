"""What is said of a Plan, the same in the terminal and on the page; how it looks is theirs."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from mtppp.plan.memory import GIB, StageMemory
from mtppp.plan.plan import NodePlan, Plan, Stage
from mtppp.plan.report import headroom
from mtppp.plan.review import Review
from mtppp_patches import invariants
from mtppp_patches.registry import PATCHES
from mtppp_patches.support import DECODE, must_be_proven

MIB, KIB = 2**20, 2**10
ENGINE_VARIABLE = "MTPPP_ENGINE"

Environment = Mapping[str, str]


def size(number: int) -> str:
    """Bytes as people read them."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(number) >= unit / 10 and (unit == KIB or abs(number) >= unit):
            return f"{number / unit:.1f} {name}"
    return f"{number} B"


def count(number: float) -> str:
    """12,345; below a hundred with one digit behind the point; "any" for infinity."""
    if math.isinf(number):
        return "any"
    return f"{number:.1f}" if number < 100 and number % 1 else f"{int(number):,}"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as "0-7, 12"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def numbered(what: str, numbers: Sequence[int]) -> str:
    """ "rank 3", "ranks 0-7"."""
    return f"{what}{'s' * (len(numbers) > 1)} {ranges(numbers)}"


def title(plan: Plan) -> str:
    drafts = f"MTP k={plan.draft_tokens}" if plan.draft_tokens else "no speculation"
    device = " on CPUs" if plan.device == "cpu" else ""
    return f"vLLM {plan.vllm}{device}, TP{plan.tensor} x PP{plan.pipeline}, {drafts}"


def ranks_of(plan: Plan, stage: Stage) -> list[int]:
    return [rank.rank for rank in plan.ranks if rank.stage == stage.index]


def layers_of(stage: Stage) -> str:
    return numbered("layer", range(stage.first_layer, stage.last_layer + 1))


def kinds_of(review: Review, stage: Stage) -> list[str]:
    """ "dense" or "moe" for each layer; empty when the layers are not known."""
    if review.model.stack is None:
        return []
    layers = review.model.stack.layers[stage.first_layer : stage.last_layer + 1]
    return [layer.mlp for layer in layers]


def roles(plan: Plan, stage: Stage) -> str:
    """What else a stage has to do."""
    found = ["API server"] if stage.index == 0 else []
    if stage.drafter:
        found.append("drafter")
    return ", ".join(found)


@dataclass(frozen=True, slots=True)
class MemorySpans:
    """What lies in one GPU of `gpu` bytes, in the order it is drawn; more than that if it does
    not fit."""

    gpu: int
    layers: int
    other: int
    cache: int
    kept: int

    @property
    def total(self) -> int:
        return self.layers + self.other + self.cache + self.kept

    @property
    def label(self) -> str:
        if self.total > self.gpu:
            return f"{size(self.total)}, more than the GPU's {size(self.gpu)}"
        return size(self.gpu)


def memory_spans(review: Review, stage: Stage) -> MemorySpans | None:
    """None where the GPU or the model's sizes are not known."""
    gpu = review.gpus[stage.index]
    if review.memory is None or gpu is None:
        return None
    memory = review.memory.stages[stage.index]
    layers = memory.parts[0].bytes
    cache = max(0, memory.free)
    kept = max(0, gpu.memory - memory.weights - cache)
    return MemorySpans(gpu.memory, layers, memory.weights - layers, cache, kept)


def memory_label(review: Review, stage: Stage, spans: MemorySpans) -> str:
    """What a drawing of one GPU's memory shows."""
    taken = f"{size(spans.layers + spans.other)} weights and buffers"
    if spans.total > spans.gpu:
        return f"{taken}, more than the GPU's {size(spans.gpu)}"
    assert review.memory is not None
    tokens = review.memory.stages[stage.index].tokens
    tokens_text = "" if tokens is None else f" ({tokens:,} tokens)"
    return f"{taken}, {size(spans.cache)} KV cache{tokens_text}, of {size(spans.gpu)}"


def memory_title(review: Review) -> str:
    what = "rank" if review.plan.device == "cpu" else "GPU"
    return f"Memory of each {what}, in {memory_unit(review)}"


def memory_unit(review: Review) -> str:
    """The unit of the table's sizes: GiB, or MiB for tiny models."""
    stages = review.memory.stages if review.memory else ()
    return "GiB" if max((stage.weights for stage in stages), default=0) >= GIB / 10 else "MiB"


def memory_columns(review: Review) -> list[str]:
    """Headings, with a line break where they are best folded."""
    columns = ["stage", "weights,\nbuffers", "of that\nreplicated", "KV bytes\nper token"]
    if review.fullest is None:
        return columns
    columns += ["KV\ncache", "tokens"]
    if length := review.serving.max_model_len:
        columns += [f"requests\nof {length:,}", "head\nroom"]
    return columns


def memory_rows(review: Review) -> Iterator[list[str]]:
    """Cells as in `memory_columns`, sizes in `memory_unit`; equal stages share a row."""
    stages = review.memory.stages if review.memory else ()
    for cells, equal in groupby(stages, key=lambda stage: _memory_cells(review, stage)):
        yield [ranges([stage.index for stage in equal]), *cells]


def _memory_cells(review: Review, stage: StageMemory) -> list[str]:
    length = review.serving.max_model_len
    unit = {"GiB": GIB, "MiB": MIB}[memory_unit(review)]
    cells = [
        f"{stage.weights / unit:.1f}",
        f"{sum(part.bytes for part in stage.replicated) / unit:.1f}",
        f"{stage.cache_per_token:,}",
    ]
    if review.fullest is not None:
        tokens = "any" if stage.tokens is None else f"{stage.tokens:,}"
        cells += [f"{stage.free / unit:.1f}", tokens]
        if length:
            spare = headroom(stage, length) / unit
            cells += [count(stage.requests(length)), f"{spare:.1f}"]
    return cells


def memory_notes(review: Review) -> Iterator[str]:
    """What the table leaves open."""
    memory, length = review.memory, review.serving.max_model_len
    if memory is None:
        return
    if review.fullest is not None:
        gpu = review.gpus[review.fullest]
        assert gpu is not None
        if memory.tokens is not None and memory.fits:
            requests = (
                f", {count(memory.concurrency(length))} requests of {length:,}" if length else ""
            )
            yield (
                f"stage {review.fullest} limits the KV cache of every stage: "
                f"{memory.tokens:,} tokens{requests}"
            )
        if largest := memory.largest_max_model_len:
            yield f"the largest max-model-len that fits is {largest:,}"
        yield (
            f"of {size(gpu.memory)} ({review.gpu_names[review.fullest]}) vLLM may use "
            f"{gpu.utilisation:.0%}; {size(gpu.overhead)} of that are an allowance for "
            "activations, CUDA graphs and NCCL, which the engine measures at start-up"
        )
    yield (
        "replicated: held whole by every rank of the stage, not divided by tensor parallelism; "
        "head room: what one request of full length leaves"
        if review.fullest is not None and length
        else "replicated: held whole by every rank of the stage, not divided by tensor parallelism"
    )


def memory_parts(stage: StageMemory) -> str:
    return ", ".join(f"{part.name} {size(part.bytes)}" for part in stage.parts)


_ON_VIOLATION = {"count": "violations are counted", "stop": "a violation ends the engine"}


def patch_lines(review: Review) -> Iterator[str]:
    """Each patch, why, and what proves it; then what proves decoding as a whole."""
    known = {patch.name: patch for patch in PATCHES}
    for name in review.plan.patches:
        patch = known[name]
        beside = ""
        if must_be_proven(name, review.plan.family):
            beside = f" ({_proof(review, name)})"
        elif name == invariants.PATCH.name:
            does = _ON_VIOLATION[review.plan.invariants]
            beside = f" (every {review.plan.sample_every} steps; {does})"
        yield f"{name}: {patch.why}{beside}"
    yield f"decoding: {_proof(review, DECODE)}"


def _proof(review: Review, what: str) -> str:
    proof = review.admission.proofs.get(what)
    if proof is not None:
        return f"{proof.level} evidence on {proof.on}, {proof.date}, {proof.record}"
    if review.admission.refusals or review.admission.overridden:
        return "not proven"
    return "as vLLM ships it"


def common_environment(plan: Plan) -> dict[str, str]:
    """What is the same on every node."""
    environments = [node.ray.env for node in plan.nodes]
    return {
        name: value
        for name, value in sorted(environments[0].items())
        if all(env.get(name) == value for env in environments)
    }


def own_environment(node: NodePlan, common: Environment) -> dict[str, str]:
    return {name: value for name, value in sorted(node.ray.env.items()) if name not in common}


def server_environment(plan: Plan) -> dict[str, str]:
    """What placement and server have beyond their node's."""
    return {
        name: value
        for name, value in sorted(plan.server.env.items())
        if name not in plan.head.ray.env
    }


def variable(name: str, value: str) -> str:
    if name == ENGINE_VARIABLE:
        return f"{name}=(what the plugin is told: {len(value):,} bytes, in --json)"
    return f"{name}={shlex.quote(value)}"


def folded(argv: Sequence[str], width: int) -> list[str]:
    """A command for a shell, its lines at most `width` long where the arguments allow it."""
    lines = [""]
    for argument in map(shlex.quote, argv):
        if lines[-1] and len(lines[-1]) + len(argument) + 3 > width:
            lines[-1] += " \\"
            lines.append("")
        lines[-1] += f" {argument}" if lines[-1] else argument
    return lines


def own_arguments(node: NodePlan, other: NodePlan) -> str:
    """What a node's `ray start` has that another's has not."""
    return shlex.join(argument for argument in node.ray.argv if argument not in other.ray.argv)


def port_lines(plan: Plan) -> Iterator[str]:
    by_block: dict[tuple[int, int], list[str]] = {}
    for node in plan.nodes:
        block = (node.ports.gcs, node.ports.last_worker)
        by_block.setdefault(block, []).append(node.host)
    for (first, last), hosts in by_block.items():
        where = "every node" if len(hosts) == len(plan.nodes) else ", ".join(hosts)
        yield f"{first}-{last} on {where}: Ray, between the nodes"
    yield f"{plan.head.ports.gcs} on {plan.head.host}: Ray's GCS, which all nodes join"
    yield f"{plan.endpoint}: the API"


def override(review: Review) -> str:
    """How the file could go ahead in spite of all that is refused; "" where it cannot."""
    if not review.refusals or not all(refusal.overridable for refusal in review.refusals):
        return ""
    codes = ", ".join(dict.fromkeys(refusal.code for refusal in review.refusals))
    return f"at_own_risk: [{codes}] in the file goes ahead all the same"


def default_lines(review: Review) -> Iterator[str]:
    """What is set where the file says nothing, with the reason."""
    for setting in review.defaults.env:
        yield f"{setting.name}={setting.value}: {setting.reason}"
    for setting in review.defaults.args:
        yield f"--{setting.name} {setting.value}: {setting.reason}"


def time_lines(review: Review) -> Iterator[str]:
    """What can be said of how long a launch takes, and what cannot."""
    times, plan = review.times, review.plan
    if times.reads:
        by_size: dict[str, list[str]] = {}
        for node, number in zip(plan.nodes, times.reads, strict=True):
            by_size.setdefault(size(number), []).append(node.host)
        read = "; ".join(f"{each} on {_hosts(hosts)}" for each, hosts in by_size.items())
        yield (
            f"weights to read: {read}. About {duration(times.from_disk)} from a disk of 3 GB/s, "
            f"{duration(times.over_network)} over a network of 10 Gb/s: assumed, not measured; "
            "what a node has read lately is in its memory"
        )
    yield (
        f"given up: after {times.placement_timeout:g} s when not all nodes have joined Ray, and "
        f"after {times.stall_timeout:g} s without a new line in the server's log"
    )
    yield (
        "not calculated: compilation, CUDA graphs, tokens per second; a launch says how long each "
        "step took"
    )


def _hosts(hosts: Sequence[str]) -> str:
    return ", ".join(hosts) if len(hosts) <= 4 else f"each of {len(hosts)} nodes"


def duration(seconds: float) -> str:
    """ "40 s", "3 min"."""
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def withheld_lines(review: Review) -> Iterator[str]:
    """What is often recommended and not set, with the reason."""
    for withheld in review.defaults.withheld:
        yield f"{withheld.name}: {withheld.reason}"
