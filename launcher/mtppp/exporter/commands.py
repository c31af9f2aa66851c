"""A Plan as plain `vllm serve` commands, one per node, with vLLM's own multi-node executor.

No Ray: with `--nnodes` and `--node-rank` the rank of a process follows from its node, so that what
runs where is right without a placement group. It needs the same number of ranks on every node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mtppp.errors import Refused
from mtppp.plan.commands import GATE
from mtppp.plan.plan import Plan
from mtppp_patches.engine_spec import RUN_DIR_VARIABLE, SPEC_VARIABLE, EngineSpec
from mtppp_patches.patch import names_needed
from mtppp_patches.registry import PATCHES

_RAY = ("--distributed-executor-backend", "ray")
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

# What belongs to Ray, to a launch's own files, or to how mtppp finds its processes.
_LEFT_OUT = frozenset(
    {
        *("PATH", "PYTHONPATH", "SPT_NOENV", "VLLM_CONFIG_ROOT", "VLLM_HOST_IP"),
        *("VLLM_RAY_BUNDLE_INDICES", "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", RUN_DIR_VARIABLE),
        *_INTERFACES,
    }
)

WITHOUT = (
    "Every rank writes what it is (host, layers, drafter, patches) to attest/rank-*.json in its "
    "run directory; nobody compares that with the plan.",
    "Nothing checks that the nodes have the same vLLM, model and plugins.",
    "Nobody waits until the server is ready or watches it. A node does not end with another: when "
    "one was stopped or has died, end the others, and look for workers that still hold GPUs.",
    "Nothing has asked whether the tokens are right: `mtppp verify` needs a deployment of its own.",
)
"""What is missing without mtppp; for the head of what is exported."""


@dataclass(frozen=True)
class NodeCommand:
    """What one node runs.

    Attributes:
        env: variables with fixed values. Beside them come VLLM_HOST_IP, the interfaces, PYTHONPATH
            and the run directory, which the script finds out.
        argv: without `--node-rank`, `--master-addr` and `--headless`.
    """

    index: int
    host: str
    address: str
    env: Mapping[str, str]
    argv: tuple[str, ...]

    @property
    def headless(self) -> bool:
        return self.index > 0


def node_commands(plan: Plan) -> tuple[NodeCommand, ...]:
    """The command of every node, in the order of the file.

    Raises:
        Refused: the nodes have different numbers of ranks.
    """
    counts = [sum(rank.node == node.index for rank in plan.ranks) for node in plan.nodes]
    if len(set(counts)) > 1:
        raise Refused(
            f"the nodes have {', '.join(map(str, counts))} ranks; without Ray, vLLM gives every "
            "node the same number",
            hint="`mtppp launch` places ranks as the file says; or use equal nodes",
        )
    argv = _without_ray(plan.server.argv)
    # One node needs no rendezvous.
    nnodes = ("--nnodes", str(len(plan.nodes))) if len(plan.nodes) > 1 else ()
    return tuple(
        NodeCommand(
            index=node.index,
            host=node.host,
            address=node.address,
            env=_environment(node.ray.env),
            argv=(*argv, *nnodes),
        )
        for node in plan.nodes
    )


def _without_ray(argv: Sequence[str]) -> tuple[str, ...]:
    """Without Ray, and without the gate, which only a launch can open."""
    at = argv.index(_RAY[0])
    rest = [part for part in argv[at + len(_RAY) :] if part not in GATE]
    return (*argv[:at], _RAY[0], "mp", *rest)


def _environment(planned: Mapping[str, str]) -> dict[str, str]:
    spec = replace(EngineSpec.from_json(planned[SPEC_VARIABLE]), placement=None)
    spec = replace(spec, patches=names_needed(PATCHES, spec))
    kept = {
        name: value
        for name, value in planned.items()
        if name not in _LEFT_OUT and not name.startswith("RAY_")
    }
    return dict(sorted({**kept, SPEC_VARIABLE: spec.to_json()}.items()))
