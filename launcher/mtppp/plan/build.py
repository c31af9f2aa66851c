"""Builds the Plan. Pure: cluster.yaml + the model's configuration + the facts of the hosts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mtppp.cluster import Cluster
from mtppp.cluster.source import describe
from mtppp.hosts.facts import HostFacts
from mtppp.model.facts import ModelFacts
from mtppp.plan import commands, directories, flags
from mtppp.plan.admission import Admission
from mtppp.plan.environment import node_environment
from mtppp.plan.layout import cut_into_stages
from mtppp.plan.memory import Serving
from mtppp.plan.plan import Command, NodePlan, Plan, Rank, RayPorts
from mtppp.plan.ports import base_of, ray_ports
from mtppp_patches.engine_spec import EngineSpec
from mtppp_patches.engine_spec import Speculative as EngineSpeculative
from mtppp_patches.patch import names_needed
from mtppp_patches.registry import PATCHES

NAMESPACE = "mtppp"
RAY = "ray"
"""Role of the process that is Ray on a node."""
SERVER = "server"
"""Role of the server's process."""
PLACEMENT_TIMEOUT = 600.0
"""Seconds until every node must have joined Ray and every GPU be reserved. Generous: a Ray that
cannot join ends by itself, which is noticed at once, and a slow one, read from a busy file system,
is not dead."""


def build_plan(
    cluster: Cluster,
    *,
    model: ModelFacts,
    admission: Admission,
    layer_partition: Sequence[int],
    ranks: tuple[Rank, ...],
    bundle: str,
    facts: Sequence[HostFacts],
) -> Plan:
    """The Plan of one deployment; that it may be launched is for the caller to see to.

    Args:
        model: facts of the model.
        admission: what is known of this combination.
        layer_partition: layers of each stage.
        ranks: where each is.
        bundle: name of the plugins' directory.
        facts: of the nodes, in the order of the file.
    """
    parallel = cluster.parallel
    family = model.model_type
    draft_tokens = cluster.speculative.tokens if cluster.speculative else 0
    spec = engine_spec(
        cluster,
        family=family,
        layer_partition=layer_partition,
        placement={
            "namespace": NAMESPACE,
            "group": cluster.name,
            "addresses": [cluster.nodes[rank.node].address for rank in ranks],
        },
    )
    ports = node_ports(cluster)
    head = _Head(cluster, facts[0], ports[0])
    environments = [
        _environment(cluster, index, spec, bundle, facts[index], len(ranks))
        for index in range(len(cluster.nodes))
    ]
    nodes = tuple(
        _node(cluster, index, bundle, facts[index], ports[index], head, environments[index])
        for index in range(len(cluster.nodes))
    )
    on_head = {**environments[0], "RAY_ADDRESS": head.ray_address}
    return Plan(
        name=cluster.name,
        model=cluster.model.id,
        served_name=cluster.model.served_name,
        family=family,
        vllm=cluster.runtime.vllm,
        device=cluster.runtime.device,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        draft_tokens=draft_tokens,
        layer_partition=tuple(layer_partition),
        stages=cut_into_stages(ranks, layer_partition, drafter=draft_tokens > 0),
        ranks=ranks,
        nodes=nodes,
        patches=spec.patches,
        evidence=admission.evidence,
        at_own_risk=tuple(refusal.code for refusal in admission.overridden),
        invariants=spec.invariants,
        sample_every=spec.sample_every if spec.invariants != "off" else 0,
        gate=cluster.verify.enabled,
        placement=Command(
            role="placement",
            argv=commands.placement(python=head.python, timeout=PLACEMENT_TIMEOUT),
            env=on_head,
            log="placement.log",
        ),
        server=Command(
            role=SERVER,
            argv=commands.server(
                python=head.python,
                model=facts[0].model_path or cluster.model.id,
                revision=cluster.model.revision,
                served_name=cluster.model.served_name,
                address=head.address,
                port=cluster.serve.port,
                tensor=parallel.tensor,
                pipeline=parallel.pipeline,
                draft_tokens=draft_tokens,
                device=cluster.runtime.device,
                gate=cluster.verify.enabled,
                args=cluster.serve.args,
            ),
            env=on_head,
            log="server.log",
        ),
        endpoint=f"http://{_in_url(head.address)}:{cluster.serve.port}",
        secrets=tuple(cluster.secrets),
    )


def serving(cluster: Cluster) -> Serving:
    """How the file says the model is served, as far as memory and time depend on it."""
    args = cluster.serve.args
    given = {
        "max_num_seqs": flags.count(args, "max-num-seqs"),
        "max_num_batched_tokens": flags.count(args, "max-num-batched-tokens"),
        "cache_type": flags.text(args, "kv-cache-dtype"),
        "max_model_len": max_model_len(args.get("max-model-len")),
    }
    known: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return Serving(
        tensor=cluster.parallel.tensor,
        expert=cluster.parallel.tensor if flags.switch(args, "enable-expert-parallel") else None,
        drafts=cluster.speculative.tokens if cluster.speculative else 0,
        release=cluster.runtime.vllm,
        **known,
    )


_THOUSANDS = {"": 1, "k": 1000, "m": 1000**2, "K": 1024, "M": 1024**2}


def max_model_len(value: object) -> int | None:
    """What vLLM reads in --max-model-len: 131072, "128K", "1.5k"; None: the engine chooses.

    Raises:
        FlagError: it is neither a length nor what makes the engine choose.
    """
    if value is None or value in (-1, "auto"):
        return None
    text = str(value)
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmKM]?)", text)
    length = float(found[1]) * _THOUSANDS[found[2]] if found else 0
    if isinstance(value, bool) or length < 1 or length % 1:
        raise flags.FlagError(
            "max-model-len",
            f"must be a number of tokens, such as 131072 or 128K; is {describe(value)}",
        )
    return int(length)


def node_ports(cluster: Cluster) -> tuple[RayPorts, ...]:
    """Ray's ports on each node."""
    return tuple(
        ray_ports(base_of(index, first=cluster.ray.base_port, local=node.transport == "local"))
        for index, node in enumerate(cluster.nodes)
    )


def engine_spec(
    cluster: Cluster,
    *,
    family: str,
    layer_partition: Sequence[int] | None = None,
    placement: Mapping[str, Any] | None = None,
) -> EngineSpec:
    """What the plugin inside vLLM is told; with the patches that this deployment needs.

    Args:
        layer_partition, placement: None while they are not known, as before a host was asked.

    Raises:
        ConfigurationError: a flag that decides what is right has a value of the wrong kind.
    """
    args = cluster.serve.args
    fields: dict[str, Any] = {
        "release": cluster.runtime.vllm,
        "model_type": family,
        "device": cluster.runtime.device,
        "tensor": cluster.parallel.tensor,
        "pipeline": cluster.parallel.pipeline,
        "expert_parallel": flags.switch(args, "enable-expert-parallel"),
        "eplb": flags.switch(args, "enable-eplb"),
        "data_parallel": flags.count(args, "data-parallel-size") or 1,
        "prefill_context": flags.count(args, "prefill-context-parallel-size") or 1,
        "decode_context": flags.count(args, "decode-context-parallel-size") or 1,
        "other_classes": _other_classes(args),
        "layer_partition": None if layer_partition is None else tuple(layer_partition),
        "speculative": (
            EngineSpeculative(cluster.speculative.method, cluster.speculative.tokens)
            if cluster.speculative
            else None
        ),
        **_invariants(cluster),
        "at_own_risk": cluster.at_own_risk,
        "placement": placement,
    }
    return EngineSpec(**fields, patches=names_needed(PATCHES, EngineSpec(**fields)))


def _invariants(cluster: Cluster) -> dict[str, Any]:
    """What is compared is what the stages of one engine tell each other."""
    watched = cluster.invariants
    engines = flags.count(cluster.serve.args, "data-parallel-size") or 1
    if cluster.parallel.pipeline == 1 or engines > 1 or not watched.sample_every:
        return {"invariants": "off"}
    return {"invariants": watched.on_violation, "sample_every": watched.sample_every}


def _other_classes(args: Mapping[str, Any]) -> bool:
    """Whether flags replace the model's classes by others than vLLM chooses."""
    own = flags.text(args, "model-impl") in {None, "auto", "vllm"}
    # A mapping or JSON; what it says of sizes is for the engine to check.
    overridden = str(args.get("hf-overrides"))
    another = "architectures" in overridden or "model_type" in overridden
    return bool(args.get("model-class-overrides")) or another or not own


class _Head:
    """The first node, as the others need to know it."""

    def __init__(self, cluster: Cluster, facts: HostFacts, ports: RayPorts) -> None:
        self.python = facts.python
        self.address = cluster.nodes[0].address
        self.ports = ports
        self.ray_address = f"{_in_url(self.address)}:{ports.gcs}"


def _environment(
    cluster: Cluster,
    index: int,
    spec: EngineSpec,
    bundle: str,
    facts: HostFacts,
    ranks: int,
) -> Mapping[str, str]:
    node = cluster.nodes[index]
    return node_environment(
        deployment=cluster.name,
        directory=directories.run_directory(facts.uid, cluster.name, index),
        plugins=directories.plugins_directory(facts.uid, bundle),
        python=facts.python,
        path=facts.path,
        address=node.address,
        interface=facts.interface or "",
        device=cluster.runtime.device,
        engine=spec.to_json(),
        layer_partition=(spec.layer_partition or ()) if spec.pipeline > 1 else (),
        ranks=ranks,
        user=cluster.runtime.env,
    )


def _node(
    cluster: Cluster,
    index: int,
    bundle: str,
    facts: HostFacts,
    ports: RayPorts,
    head: _Head,
    environment: Mapping[str, str],
) -> NodePlan:
    node = cluster.nodes[index]
    ray_directory = directories.ray_directory(facts.uid, cluster.name, index)
    store = cluster.ray.object_store_memory
    argv = (
        commands.ray_head(
            python=facts.python,
            address=node.address,
            ports=ports,
            directory=ray_directory,
            gpus=node.gpus,
            store=store,
        )
        if index == 0
        else commands.ray_worker(
            python=facts.python,
            address=node.address,
            head=head.ray_address,
            ports=ports,
            directory=ray_directory,
            gpus=node.gpus,
            store=store,
        )
    )
    return NodePlan(
        index=index,
        host=node.host,
        address=node.address,
        directory=directories.run_directory(facts.uid, cluster.name, index),
        ray_directory=ray_directory,
        plugins=directories.plugins_directory(facts.uid, bundle),
        ports=ports,
        ray=Command(role=RAY, argv=argv, env=environment, log="ray.log"),
    )


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address
