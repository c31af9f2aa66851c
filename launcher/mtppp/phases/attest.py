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
from mtppp.plan.plan import Plan
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
                hint="this would serve something else than the file says; it was stopped. What a"
                f" rank said on its way: mtppp logs {deployment.file} --rank RANK",
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
    """Where ranks differ from the Plan, one line each.

    Args:
        attested: records of ranks; `node` is the index of the node whose run directory held it.
        secrets: values of the file's secrets; none of them is shown.
    """
    by_rank: dict[int, list[Mapping[str, Any]]] = {}
    for record in attested:
        by_rank.setdefault(record["rank"], []).append(record)
    for rank in plan.ranks:
        records = by_rank.pop(rank.rank, [])
        if not records:
            yield f"rank {rank.rank} has not attested"
            continue
        if len(records) > 1:
            hosts = sorted(plan.nodes[record["node"]].host for record in records)
            yield f"rank {rank.rank} attested on {', '.join(hosts)}"
            continue
        record = records[0]
        stage = plan.stages[rank.stage]
        layers = list(range(stage.first_layer, stage.last_layer + 1))
        address = plan.nodes[rank.node].address
        wanted = {
            "node": rank.node,
            "address": address,
            "stage": rank.stage,
            "tensor_rank": rank.tensor_rank,
            "layers": layers,
            "async_scheduling": True,
            "invariants": plan.invariants,
            "executor": "ray",
            "release": plan.vllm,
            "plugins": plan.nodes[rank.node].plugins.rpartition("/")[2],
            "displaced": [],
        }
        held = {**record, "release": str(record.get("vllm")).partition("+")[0]}
        for what, planned in wanted.items():
            if held.get(what) != planned:
                yield (
                    f"rank {rank.rank}: {what} is {_short(held.get(what))},"
                    f" planned is {_short(planned)}"
                )
        if bool(record.get("drafter")) != stage.drafter:
            yield (
                f"rank {rank.rank} of stage {rank.stage} has"
                f" {'a' if record.get('drafter') else 'no'} drafter"
            )
        if not record.get("runner_v2"):
            yield f"rank {rank.rank}: runs {record.get('runner')}, not the V2 model runner"
        patches = record.get("patches", {})
        if sorted(patches) != sorted(plan.patches):
            yield (
                f"rank {rank.rank}: patches are {_names(patches)},"
                f" planned are {_names(plan.patches)}"
            )
        last = rank.stage == len(plan.stages) - 1
        for name, what in _not_in_place(plan, patches, last_stage=last):
            yield f"rank {rank.rank}: of patch {name} is not in place: {what}"
        planned_environment = effective(plan.nodes[rank.node].ray.env)
        for what in _variables(planned_environment, secrets, record.get("environment")):
            yield f"rank {rank.rank}: {what}"
    for number in sorted(by_rank):
        yield f"rank {number} attested, but is not in the Plan"


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
