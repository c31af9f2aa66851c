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
from mtppp.plan import directories
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
            hub=None if cluster.model.is_path else _in_hub(cluster),
            ports=[*listened(ports[index], head=head), *([cluster.serve.port] if head else [])],
        )

    look_at_each(range(len(deployment.nodes)), ask)
    return [answers[index] for index in range(len(deployment.nodes))]


def _in_hub(cluster: Cluster) -> dict[str, str]:
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
    name = deployment.cluster.name
    running: list[str] = []

    def look(index: int) -> None:
        node, uid = deployment.nodes[index], deployment.facts[index].uid
        if node.processes(directories.run_directory(uid, name, index))["marked"]:
            running.append(node.host)

    look_at_each(range(len(deployment.nodes)), look)
    return bool(running)


def host_problems(deployment: Deployment) -> list[str]:
    """What on the hosts is not as the file needs it, once they were asked."""
    facts = deployment.facts
    if deployment.running:
        # Its ports are taken by itself.
        facts = [replace(fact, ports_taken=()) for fact in facts]
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
    if facts.ports_taken:
        taken = ", ".join(str(port) for port in facts.ports_taken)
        yield f"something else listens on {taken}; set ray.base_port or serve.port to free ones"
    if facts.ports_forbidden:
        forbidden = ", ".join(str(port) for port in facts.ports_forbidden)
        yield f"{facts.user} may not listen on {forbidden}; set serve.port to 1024 or higher"
    if cluster.model.is_path and facts.model_config is None:
        yield f"there is no {facts.model_path}/config.json that {facts.user} may read"


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
