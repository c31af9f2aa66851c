"""Ranks run where cluster.yaml says: a placement group of our own, handed to vLLM's Ray executor.

Left alone, vLLM orders the nodes by Ray's random node ids, the driver's first: on three nodes or
more the stages land anywhere. `vllm serve` has no flag for a group. So the launcher runs this
module once on the first node (`python -m mtppp_patches.placement`), which makes a named, detached
group with one bundle per rank, pinned to its node; and EngineCore finds that group and uses it.

`EngineSpec.placement` is `{"namespace": str, "group": str, "addresses": [address of each rank]}`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mtppp_patches.engine_spec import SPEC_VARIABLE, EngineSpec
from mtppp_patches.patch import Patch, PatchError, Target
from mtppp_patches.releases import RELEASES


def bundles(addresses: Sequence[str]) -> list[dict[str, float]]:
    """One bundle per rank: a GPU, and a trifle of the resource that only its node has."""
    return [{"GPU": 1.0, f"node:{address}": 0.001} for address in addresses]


# ---- on the launcher's behalf ----------------------------------------------------------------


def main() -> int:
    """Make the group; a JSON object on standard output says what failed. Exit status 0 or 1."""
    parser = argparse.ArgumentParser(description="Make the placement group of a deployment.")
    parser.add_argument("--timeout", type=float, required=True, help="seconds in all")
    timeout = parser.parse_args().timeout
    placement = EngineSpec.from_json(os.environ[SPEC_VARIABLE]).placement
    if placement is None:
        raise PatchError("this deployment has no placement")
    problem = create(placement, timeout)
    json.dump({"problem": problem}, sys.stdout)
    return 0 if problem is None else 1


def create(placement: Mapping[str, Any], timeout: float) -> str | None:
    """Make the group once all its nodes are there.

    Returns:
        What is missing when `timeout` seconds have passed; None when the group is ready.
    """
    import ray
    from ray.util import placement_group, remove_placement_group

    deadline = time.monotonic() + timeout
    while (problem := _connect(placement["namespace"])) is not None:
        if time.monotonic() > deadline:
            return problem
        time.sleep(0.5)
    addresses = placement["addresses"]
    while (problem := missing(Counter(addresses), ray.nodes())) is not None:
        if time.monotonic() > deadline:
            return problem
        time.sleep(0.2)
    _remove(placement["group"])
    group = placement_group(
        bundles(addresses), strategy="PACK", name=placement["group"], lifetime="detached"
    )
    if not group.wait(max(1, round(deadline - time.monotonic()))):
        remove_placement_group(group)
        return "all nodes are there, but Ray could not reserve a GPU for every rank"
    return None


def _connect(namespace: str) -> str | None:
    """Join Ray; why that did not work, or None.

    Ray itself gives up within seconds when its first raylet has not registered yet, as on a machine
    that is busy, or reads Ray from a slow file system.
    """
    import ray

    try:
        ray.init(namespace=namespace, logging_level="ERROR", log_to_driver=False)
    except (ConnectionError, RuntimeError) as error:
        ray.shutdown()
        return f"Ray on the first node takes no connection: {str(error).partition(chr(10))[0]}"
    return None


def _remove(group: str) -> None:
    """Remove the group of a server that has ended, whose Ray has lived on."""
    from ray.util import get_placement_group, remove_placement_group

    with contextlib.suppress(ValueError):  # there is none
        remove_placement_group(get_placement_group(group))


def missing(needed: Mapping[str, int], nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """Which nodes, or GPUs of a node, have not joined; None when all have.

    Args:
        needed: GPUs by node address.
        nodes: as `ray.nodes()` lists them.
    """
    joined = {n["NodeManagerAddress"]: n["Resources"] for n in nodes if n["Alive"]}
    for address, gpus in needed.items():
        if address not in joined:
            return f"{address} has not joined; joined have {', '.join(sorted(joined)) or 'none'}"
        if joined[address].get("GPU", 0) < gpus:
            return f"{address} has {joined[address].get('GPU', 0):g} GPUs, {gpus} are needed"
    return None


# ---- inside EngineCore -----------------------------------------------------------------------


def _adopt(original: Any, spec: EngineSpec) -> Any:
    placement = spec.placement
    assert placement is not None

    @functools.wraps(original)
    def _init_executor(self: Any) -> None:
        import ray
        from ray.util import get_placement_group

        # A group is found by name only within the namespace it was made in, so this process must
        # join that before vLLM calls `ray.init`, which then leaves the connection alone.
        if not ray.is_initialized():
            ray.init(
                namespace=placement["namespace"],
                runtime_env=self.parallel_config.ray_runtime_env,
            )
        self.parallel_config.placement_group = get_placement_group(placement["group"])
        original(self)

    return _init_executor


PATCH = Patch(
    name="placement",
    why="vLLM orders nodes by random ids; cluster.yaml says which stage runs where.",
    releases=RELEASES,
    obsolete_by="none: vLLM has no way to be given a placement group from the command line",
    scope="deployment",
    wanted=lambda spec: spec.placement is not None,
    targets=(
        Target("vllm.v1.executor.ray_executor_v2", "RayExecutorV2._init_executor", replace=_adopt),
    ),
)


if __name__ == "__main__":
    sys.exit(main())
