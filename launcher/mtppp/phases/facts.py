"""Ask every host what it is, and compare that with what the file needs of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mtppp.cluster import Cluster
from mtppp.cluster import Node as ClusterNode
from mtppp.console import Step
from mtppp.errors import MtpppError
from mtppp.gpus import GPU_TYPES
from mtppp.hosts.facts import HostFacts
from mtppp.phases.deployment import Deployment
from mtppp.phases.phase import WithoutTrace, look_at_each
from mtppp.plan.build import node_ports
from mtppp.plan.ports import listened

MINIMUM_RAY = (2, 60)
GPU_MEMORY_TOLERANCE = 0.03
"""Share by which a driver's figure may differ from its type's: firmware and ECC take some."""


class GatherFacts(WithoutTrace):
    """Facts of all hosts. Nothing on a host has been changed yet when this fails."""

    title = "hosts"

    def run(self, deployment: Deployment, step: Step) -> None:
        deployment.facts = gather(deployment)
        deployment.running = is_running(deployment)
        found = host_problems(deployment)
        if found:
            raise MtpppError(
                "the hosts are not as the file says" if len(found) > 1 else found[0],
                details=found if len(found) > 1 else (),
                hint="nothing was started; correct the hosts or the file, then launch again",
            )
        first = deployment.facts[0]
        step.note = (
            f"vLLM {first.versions['vllm']}, Ray {first.versions['ray']},"
            f" Python {first.python_version}"
        )


def gather(deployment: Deployment) -> list[HostFacts]:
    """Facts of every host, in the order of the file."""
    cluster = deployment.cluster
    answers: dict[int, HostFacts] = {}
    ports = node_ports(cluster)

    def ask(index: int) -> None:
        head = index == 0
        answers[index] = deployment.nodes[index].facts(
            address=cluster.nodes[index].address,
            model_path=cluster.model.id if cluster.model.is_path else None,
            hub=None if cluster.model.is_path else in_hub(cluster),
            ports=[*listened(ports[index], head=head), *([cluster.serve.port] if head else [])],
        )

    look_at_each(range(len(deployment.nodes)), ask)
    return [answers[index] for index in range(len(deployment.nodes))]


def in_hub(cluster: Cluster) -> dict[str, str]:
    """The model of a hub, and where vLLM keeps what it downloads: it sees no other variables."""
    env = cluster.runtime.env
    home = env.get("HF_HOME", "~/.cache/huggingface")
    return {
        "model": cluster.model.id,
        "revision": cluster.model.revision or "main",
        "cache": env.get("HF_HUB_CACHE", f"{home}/hub"),
    }


def is_running(deployment: Deployment) -> bool:
    """Whether any node has live processes of this deployment."""
    return any(
        (found.name, found.node) == (deployment.cluster.name, str(index))
        for index, facts in enumerate(deployment.facts)
        for found in facts.deployments
    )


def host_problems(deployment: Deployment) -> list[str]:
    """What on the hosts is not as the file needs it, once they were asked."""
    facts = deployment.facts
    ours = f"deployment {deployment.cluster.name}"
    facts = [
        replace(fact, ports_taken=tuple(taken for taken in fact.ports_taken if taken[1] != ours))
        for fact in facts
    ]
    return list(problems(deployment.cluster, facts))


def problems(cluster: Cluster, facts: Sequence[HostFacts]) -> Iterator[str]:
    """What on the hosts is not as the file needs it; one line each, with the host's name."""
    for index, (node, fact) in enumerate(zip(cluster.nodes, facts, strict=True)):
        for problem in _problems_of(cluster, index, fact):
            yield f"{node.host}: {problem}"
    yield from _differences(cluster, facts)


def _problems_of(cluster: Cluster, index: int, facts: HostFacts) -> Iterator[str]:
    node = cluster.nodes[index]
    if facts.vllm_release is None:
        yield f"{facts.python} has no vLLM; runtime.vllm asks for {cluster.runtime.vllm}"
    elif facts.vllm_release != cluster.runtime.vllm:
        yield (
            f"{facts.python} has vLLM {facts.vllm_release};"
            f" runtime.vllm asks for {cluster.runtime.vllm}"
        )
    ray = facts.versions["ray"]
    if ray is None:
        yield f"{facts.python} has no Ray; vLLM's own images have had none since 0.19"
    elif _version(ray) < MINIMUM_RAY:
        yield f"Ray {ray} is too old: token authentication needs 2.60 or newer"
    if facts.interface is None:
        held = ", ".join(f"{name} {address}" for name, address in facts.addresses)
        yield f"no interface has the address {node.address}; it has {held}"
    if cluster.runtime.device == "cuda" and len(facts.gpus) < node.gpus:
        yield f"nodes[{index}].gpus is {node.gpus}, but the driver shows {len(facts.gpus)} GPUs"
    yield from _wrong_gpus(node, facts)
    yield from _neighbours(cluster, index, facts)
    yield from _taken_ports(cluster, facts)
    if facts.ports_forbidden:
        forbidden = ", ".join(str(port) for port in facts.ports_forbidden)
        yield f"{facts.user} may not listen on {forbidden}; set serve.port to 1024 or higher"
    if cluster.model.is_path and facts.model_config is None:
        yield (
            f"no model is at {facts.model_path}: there is no config.json that {facts.user} may"
            " read; copy it there, or set model.id to a path that every node has"
        )


def _neighbours(cluster: Cluster, index: int, facts: HostFacts) -> Iterator[str]:
    for other in facts.deployments:
        launched = f", launched by {other.by} at {other.since}" if other.by else ""
        if other.name == cluster.name and other.node != str(index) and not _is_local(cluster):
            yield (
                f"{other.name} runs there as nodes[{other.node}]{launched}, and the file has the"
                f" host as nodes[{index}]: stop it with the file it was launched from"
            )
        elif other.name != cluster.name and "cuda" == other.device == cluster.runtime.device:
            yield (
                f"its GPUs are taken by deployment {other.name}{launched};"
                " stop that, or use another host"
            )


def _is_local(cluster: Cluster) -> bool:
    """Whether nodes share a machine, so that one finds the others there."""
    return any(node.transport == "local" for node in cluster.nodes)


def _taken_ports(cluster: Cluster, facts: HostFacts) -> Iterator[str]:
    by_holder: dict[tuple[str, str], list[int]] = {}
    for port, holder in facts.ports_taken:
        key = "serve.port" if port == cluster.serve.port else "ray.base_port"
        by_holder.setdefault((holder, key), []).append(port)
    for (holder, key), ports in by_holder.items():
        listed = ", ".join(str(port) for port in ports)
        taken = f"port {listed} is" if len(ports) == 1 else f"ports {listed} are"
        yield f"{taken} taken ({holder}); set {key} to a free one"


def _wrong_gpus(node: ClusterNode, facts: HostFacts) -> Iterator[str]:
    if node.gpu_type is None:
        return
    wanted = GPU_TYPES[node.gpu_type]
    for gpu in dict.fromkeys(facts.gpus):
        is_near = abs(gpu.memory / wanted.memory - 1) <= GPU_MEMORY_TOLERANCE
        if gpu.compute_capability != wanted.compute_capability or not is_near:
            yield (
                f"gpu_type is {node.gpu_type}, but the driver shows {gpu.name} with "
                f"{gpu.memory / 2**30:.1f} GiB and compute capability {gpu.compute_capability}"
            )


def _differences(cluster: Cluster, facts: Sequence[HostFacts]) -> Iterator[str]:
    compared: dict[str, Callable[[HostFacts], str | None]] = {
        "Ray": lambda fact: fact.versions["ray"],
        "torch": lambda fact: fact.versions["torch"],
        "Python": lambda fact: fact.python_version.rpartition(".")[0],
        # vLLM's driver hands its path to all workers.
        "model.id": lambda fact: fact.model_path,
    }
    for what, version_of in compared.items():
        versions = [version_of(fact) for fact in facts]
        if len(set(versions)) > 1:
            held = ", ".join(
                f"{node.host} {version}"
                for node, version in zip(cluster.nodes, versions, strict=True)
            )
            yield f"{what} must be the same on all nodes: {held}"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
