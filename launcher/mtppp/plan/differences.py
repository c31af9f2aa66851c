"""How a Plan differs from the one that runs, in people's words.

The running one is read from the JSON a node keeps, perhaps written by another version of mtppp:
what it does not have is "nothing". What only follows from something else that is named (the
engine's copy of the Plan, paths of the plugins) is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtppp.plan.partition import in_words

NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is planned otherwise than it runs.

    Attributes:
        what: in words.
        running, planned: NOTHING where one side does not have it.
    """

    what: str
    running: str
    planned: str

    def __str__(self) -> str:
        if self.running == NOTHING:
            return f"{self.what}: {self.planned} would be new"
        if self.planned == NOTHING:
            return f"{self.what}: {self.running} would be gone"
        return f"{self.what}: {self.running} runs, {self.planned} is planned"


_FIELDS = {
    "model": "model",
    "served_name": "name that clients ask for",
    "family": "family of the model",
    "vllm": "vLLM",
    "device": "device",
    "tensor": "tensor-parallel size",
    "pipeline": "pipeline stages",
    "draft_tokens": "draft tokens per step",
    "layer_partition": "layers of each stage",
    "patches": "patches",
    "evidence": "evidence",
    "at_own_risk": "at own risk",
    "invariants": "what a violated invariant does",
    "sample_every": "steps from one check of invariants to the next",
    "endpoint": "address of the server",
    "secrets": "secrets that processes are given",
}
# What their values follow from is named in other words.
_DERIVED_VARIABLES = frozenset({"MTPPP_ENGINE", "PYTHONPATH", "VLLM_PP_LAYER_PARTITION"})
_DERIVED_VARIABLES |= {"VLLM_RAY_BUNDLE_INDICES", "RAY_ADDRESS"}
_DERIVED_FLAGS = frozenset(
    {
        "--served-model-name",
        "--host",
        "--port",
        "--tensor-parallel-size",
        "--pipeline-parallel-size",
        "--speculative-config",
    }
)

Json = Mapping[str, Any]


def differences(running: Json, planned: Json) -> tuple[Difference, ...]:
    """Every difference, the most telling first.

    Args:
        running, planned: the fields of two Plans, as JSON gives them.
    """
    found = [
        *_of_fields(running, planned),
        *_of_placement(running, planned),
        *_of_nodes(running, planned),
        *_of_command("vllm serve", running.get("server", {}), planned.get("server", {})),
    ]
    if not found and running != planned:
        found.append(Difference("the Plan", "another version of mtppp's", "this version's"))
    return tuple(found)


def _of_fields(running: Json, planned: Json) -> Iterator[Difference]:
    for name, what in _FIELDS.items():
        yield from _compared(what, running.get(name), planned.get(name))


def _of_placement(running: Json, planned: Json) -> Iterator[Difference]:
    """Which stage is where, by the hosts' names."""
    ran, will = _stage_hosts(running), _stage_hosts(planned)
    for stage in sorted(ran.keys() & will.keys()):
        yield from _compared(f"stage {stage}", ran[stage], will[stage])


def _stage_hosts(plan: Json) -> dict[int, str]:
    nodes = {node["index"]: node["host"] for node in plan.get("nodes", ())}
    return {
        stage["index"]: "on " + "+".join(str(nodes.get(index)) for index in stage["nodes"])
        for stage in plan.get("stages", ())
    }


def _of_nodes(running: Json, planned: Json) -> Iterator[Difference]:
    ran = {node["host"]: node for node in running.get("nodes", ())}
    will = {node["host"]: node for node in planned.get("nodes", ())}
    for host in [*will, *(host for host in ran if host not in will)]:
        if host not in will:
            yield Difference("node", host, NOTHING)
        elif host not in ran:
            yield Difference("node", NOTHING, host)
    yield from _on_each(
        {host: list(_of_node(ran[host], will[host])) for host in will if host in ran}
    )


def _on_each(by_host: Mapping[str, Sequence[Difference]]) -> Iterator[Difference]:
    """What differs on every node is said once."""
    if not by_host:
        return
    everywhere = [
        difference
        for difference in next(iter(by_host.values()))
        if len(by_host) > 1 and all(difference in others for others in by_host.values())
    ]
    for difference in everywhere:
        yield _placed("every node", difference)
    for host, found in by_host.items():
        for difference in found:
            if difference not in everywhere:
                yield _placed(host, difference)


def _placed(where: str, difference: Difference) -> Difference:
    return Difference(f"{where}: {difference.what}", difference.running, difference.planned)


def _of_node(running: Json, planned: Json) -> Iterator[Difference]:
    yield from _compared("place in the pipeline", running.get("index"), planned.get("index"))
    yield from _compared("address", running.get("address"), planned.get("address"))
    yield from _compared("run directory", running.get("directory"), planned.get("directory"))
    ports = [side.get("ports", {}).get("gcs") for side in (running, planned)]
    yield from _compared("Ray's ports from", *ports)
    bundles = [str(side.get("plugins", "")).rpartition("/")[2] for side in (running, planned)]
    yield from _compared("plugins", *bundles)
    ran, will = running.get("ray", {}), planned.get("ray", {})
    yield from _of_command("ray start", ran, will, only=("--num-gpus", "--object-store-memory"))
    yield from _of_environment(ran.get("env", {}), will.get("env", {}))


def _of_environment(running: Json, planned: Json) -> Iterator[Difference]:
    for name in sorted(running.keys() | planned.keys()):
        if name not in _DERIVED_VARIABLES:
            yield from _compared(name, running.get(name), planned.get(name))


def _of_command(
    command: str, running: Json, planned: Json, only: Sequence[str] = ()
) -> Iterator[Difference]:
    ran, will = _flags(running.get("argv", ())), _flags(planned.get("argv", ()))
    for flag in sorted(ran.keys() | will.keys()):
        if flag not in _DERIVED_FLAGS and (not only or flag in only):
            yield from _compared(f"{command} {flag}", ran.get(flag), will.get(flag))


def _flags(argv: Sequence[str]) -> dict[str, str]:
    """Flags with what follows them; a switch has "on"."""
    found: dict[str, list[str]] = {}
    flag = ""
    for argument in argv:
        if argument.startswith("--"):
            flag, given, value = argument.partition("=")
            found[flag] = [value] if given else []
        elif flag:
            found[flag].append(argument)
    return {flag: " ".join(values) or "on" for flag, values in found.items()}


def _compared(what: str, running: Any, planned: Any) -> Iterator[Difference]:
    ran, will = _words(running), _words(planned)
    if ran != will:
        yield Difference(what, ran, will)


def _words(value: Any) -> str:
    match value:
        case None | "" | [] | ():
            return NOTHING
        case [*items] if all(isinstance(item, int) for item in items):
            return in_words(items)
        case [*items] if all(isinstance(item, str) for item in items):
            return ", ".join(items)
        case str():
            return value
        case _:
            return json.dumps(value, sort_keys=True)
