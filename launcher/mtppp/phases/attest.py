"""Read back what every rank says it is, and compare it with the Plan."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mtppp.console import Step
from mtppp.errors import MtpppError, RemoteCommandFailed
from mtppp.hosts.node import File
from mtppp.phases.deployment import Deployment
from mtppp.phases.phase import WithoutTrace, on_each
from mtppp.phases.run_directory import SHARED_MEMORY_FILE
from mtppp.plan.environment import effective
from mtppp.plan.plan import Plan, Rank
from mtppp_patches.attest import digest
from mtppp_patches.presence import lacking
from mtppp_patches.registry import PATCHES

_VALUE = 60  # characters of a variable's value in a message


class Attest(WithoutTrace):
    title = "attest"

    def run(self, deployment: Deployment, step: Step) -> None:
        attested: list[dict[str, Any]] = []
        members = deployment.members

        def read(index: int) -> None:
            node, planned = members[index]
            for path, text in node.read(f"{planned.directory}/attest/rank-*.json").items():
                attested.append(_record(node.host, path, text) | {"node": index})
            mapped = node.processes(planned.directory)["shared_memory"]
            node.write(planned.directory, [File(SHARED_MEMORY_FILE, json.dumps(mapped).encode())])

        on_each(range(len(members)), read)
        found = list(differences(deployment.plan, attested, deployment.secrets))
        if found:
            raise MtpppError(
                "the ranks are not what was planned",
                details=found,
                hint="this would serve something else than the file says; it was stopped. What"
                " changes it is in serve.args or on those hosts, such as another plugin of vLLM;"
                f" what a rank said on its way: mtppp logs {deployment.file} --rank RANK",
            )
        step.note = f"{len(attested)} ranks are as planned"


def _record(host: str, path: str, text: str) -> dict[str, Any]:
    """What a rank wrote.

    Raises:
        RemoteCommandFailed: it is no record of a rank.
    """
    try:
        record: dict[str, Any] = json.loads(text)
        int(record["rank"])
    except (ValueError, KeyError, TypeError):
        raise RemoteCommandFailed(
            host, f"{path} is no record of a rank", hint="launch again; look at the node's disk"
        ) from None
    return record


def differences(
    plan: Plan, attested: Sequence[Mapping[str, Any]], secrets: Mapping[str, str]
) -> Iterator[str]:
    """Where ranks differ from the Plan: of the ranks of one host that differ alike, one line.

    Args:
        attested: records of ranks; `node` is the index of the node whose run directory held it.
        secrets: values of the file's secrets; none of them is shown.
    """
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, host, what in _of_each(plan, attested, secrets):
        alike.setdefault((host, what), []).append(rank)
    for (host, what), ranks in alike.items():
        yield f"{'rank' if len(ranks) == 1 else 'ranks'} {_short(ranks)} on {host}: {what}"


def _of_each(
    plan: Plan, attested: Sequence[Mapping[str, Any]], secrets: Mapping[str, str]
) -> Iterator[tuple[int, str, str]]:
    """Rank, host and what differs there; of a rank that has not attested, the host it should be
    on."""
    by_rank: dict[int, list[Mapping[str, Any]]] = {}
    for record in attested:
        by_rank.setdefault(record["rank"], []).append(record)
    for rank in plan.ranks:
        records = by_rank.pop(rank.rank, [])
        if not records:
            yield rank.rank, plan.nodes[rank.node].host, "nothing attested"
        elif len(records) > 1:
            yield rank.rank, _hosts(plan, records), "attested on each"
        else:
            for what in _of_rank(plan, rank, records[0], secrets):
                yield rank.rank, _hosts(plan, records), what
    for number in sorted(by_rank):
        yield number, _hosts(plan, by_rank[number]), "attested, but not in the Plan"


def _hosts(plan: Plan, records: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(sorted(plan.nodes[record["node"]].host for record in records))


def _of_rank(
    plan: Plan, rank: Rank, record: Mapping[str, Any], secrets: Mapping[str, str]
) -> Iterator[str]:
    """How what one rank has attested differs from the Plan."""
    stage, node = plan.stages[rank.stage], plan.nodes[rank.node]
    wanted = {
        "host": node.host,
        "address": node.address,
        "stage": rank.stage,
        "tensor_rank": rank.tensor_rank,
        "layers": list(range(stage.first_layer, stage.last_layer + 1)),
        "async_scheduling": True,
        "invariants": plan.invariants,
        "executor": "ray",
        "release": plan.vllm,
        "plugins": node.plugins.rpartition("/")[2],
        "displaced": [],
    }
    held = {
        **record,
        "host": plan.nodes[record["node"]].host,
        "release": str(record.get("vllm")).partition("+")[0],
    }
    for what, planned in wanted.items():
        if held.get(what) != planned:
            yield f"{what} is {_short(held.get(what))}, planned is {_short(planned)}"
    if bool(record.get("drafter")) != stage.drafter:
        drafter = record.get("drafter") or "none"
        yield f"drafter is {drafter}, planned is {'one' if stage.drafter else 'none'}"
    if not record.get("runner_v2"):
        yield f"runs {record.get('runner')}, not the V2 model runner"
    patches = record.get("patches", {})
    if sorted(patches) != sorted(plan.patches):
        yield f"patches are {_names(patches)}, planned are {_names(plan.patches)}"
    last = rank.stage == len(plan.stages) - 1
    for name, what in _not_in_place(plan, patches, last_stage=last):
        yield f"of patch {name} is not in place: {what}"
    yield from _variables(effective(node.ray.env), secrets, record.get("environment"))


def _not_in_place(
    plan: Plan, patches: Mapping[str, Any], *, last_stage: bool
) -> Iterator[tuple[str, str]]:
    """Planned patch and what a rank lacks of it, of those that it says it has.

    Args:
        patches: by name, what a rank has attested.
    """
    for patch in PATCHES:
        if patch.name in plan.patches and patch.name in patches:
            in_place = frozenset((patches[patch.name] or {}).get("targets", ()))
            for what in lacking(patch, plan.vllm, in_place, last_stage=last_stage):
                yield patch.name, what


def _variables(
    planned: Mapping[str, str], secrets: Mapping[str, str], held: Mapping[str, str] | None
) -> Iterator[str]:
    """What of its environment a rank has otherwise than planned.

    Args:
        held: variables with digests of their values, as the rank has attested.
    """
    if held is None:
        yield "its environment is not attested"
        return
    for name, value in sorted({**planned, **secrets}.items()):
        if held.get(name) == digest(value):
            continue
        known = "the value that you have" if name in secrets else _cut(value)
        found = "has another value" if name in held else "is not set"
        yield f"variable {name} {found}, planned is {known}"


def _cut(value: str) -> str:
    return value if len(value) <= _VALUE else f"{value[:_VALUE]}..."


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _short(value: object) -> str:
    """Layers as "0-2,7", everything else as it is."""
    if not (isinstance(value, list) and value and all(isinstance(item, int) for item in value)):
        return str(value)
    return ",".join(_ranges(value))


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    first = previous = numbers[0]
    for number in [*numbers[1:], None]:
        if number is not None and number == previous + 1:
            previous = number
            continue
        yield str(first) if first == previous else f"{first}-{previous}"
        if number is not None:
            first = previous = number
