"""The Plan: all that a launch will do, as a value.

The same input gives the same Plan, byte for byte. It holds no secret, token or time: a secret is
a name here, and gets its value only when a process is started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rank:
    """One GPU's worker.

    Attributes:
        rank: global rank; equals stage * tensor + tensor_rank.
        stage, tensor_rank: its place in the pipeline and within its stage.
        node: index of its node in cluster.yaml.
    """

    rank: int
    stage: int
    tensor_rank: int
    node: int


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage: decoder layers first_layer .. last_layer, both included."""

    index: int
    nodes: tuple[int, ...]
    first_layer: int
    last_layer: int
    drafter: bool


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start: `log` is a file name in the run directory."""

    role: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: str


@dataclass(frozen=True, slots=True)
class RayPorts:
    """The ports Ray uses on one node, a block of 100 from `base`."""

    gcs: int
    node_manager: int
    object_manager: int
    runtime_env_agent: int
    dashboard_agent_http: int
    dashboard_agent_grpc: int
    metrics_export: int
    dashboard: int
    client_server: int
    first_worker: int
    last_worker: int


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What happens on one node.

    Attributes:
        index: position in cluster.yaml.
        host, address: how it is reached; its address on the cluster fabric.
        directory: the run directory, private to this deployment and node.
        ray_directory: Ray's temp-dir; at most 43 characters, since Ray puts Unix sockets below it
            and their paths end at 107 bytes.
        plugins: the directory of the plugins, named by the hash of their contents.
        ports: Ray's.
        ray: the command that joins this node to the deployment's Ray cluster.
    """

    index: int
    host: str
    address: str
    directory: str
    ray_directory: str
    plugins: str
    ports: RayPorts
    ray: Command


@dataclass(frozen=True, slots=True)
class Plan:
    """One deployment.

    Attributes:
        name: of the deployment.
        model, served_name, family: what is served; `family` is the configuration's model_type.
        vllm: the release that every node must have.
        device: cuda or cpu.
        tensor, pipeline: parallel sizes.
        draft_tokens: k of MTP; 0 without speculation.
        stages, ranks, nodes: see there; nodes in the order of cluster.yaml.
        layer_partition: layers per stage, also without pipeline parallelism.
        patches: names of the patches that vLLM needs for this model on this release.
        evidence: how it is known that this combination is right.
        at_own_risk: what the file says to go ahead with all the same.
        invariants: what a violation of a run-time invariant does: "count", "stop"; "off".
        sample_every: steps from one at which invariants are checked to the next; 0 when off.
        gate: whether requests of others are held until the deployment was verified.
        placement: command that makes the placement group, on the first node.
        server: command that serves, on the first node.
        endpoint: base URL of the server.
        secrets: names of variables whose values are taken from the operator's environment.
    """

    name: str
    model: str
    served_name: str
    family: str
    vllm: str
    device: str
    tensor: int
    pipeline: int
    draft_tokens: int
    layer_partition: tuple[int, ...]
    stages: tuple[Stage, ...]
    ranks: tuple[Rank, ...]
    nodes: tuple[NodePlan, ...]
    patches: tuple[str, ...]
    evidence: str
    at_own_risk: tuple[str, ...]
    invariants: str
    sample_every: int
    gate: bool
    placement: Command
    server: Command
    endpoint: str
    secrets: tuple[str, ...]

    @property
    def head(self) -> NodePlan:
        """The node of stage 0, of Ray's head and of the API server."""
        return self.nodes[0]

    def to_json(self) -> str:
        """The Plan as JSON with sorted keys; equal Plans give equal text."""
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    def fields(self) -> dict[str, Any]:
        """The fields as `fields_of` reads them: tuples have become lists."""
        return self.fields_of(self.to_json())

    @staticmethod
    def fields_of(text: str) -> dict[str, Any]:
        """The fields of a Plan written by `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        return fields
