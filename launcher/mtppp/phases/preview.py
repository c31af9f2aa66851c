"""Look at a deployment without changing anything: what would be planned, and what runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mtppp.cluster import Cluster
from mtppp.console import Step
from mtppp.errors import ConfigurationError, MtpppError, RemoteCommandFailed
from mtppp.hosts.facts import UNKNOWN_UID, GpuFacts, HostFacts
from mtppp.phases.connect import Connect
from mtppp.phases.deployment import Deployment
from mtppp.phases.environment import use_environment
from mtppp.phases.facts import gather, is_running
from mtppp.phases.find_model import ReadModel
from mtppp.phases.make_plan import ReviewPlan
from mtppp.phases.phase import Phase, WithoutTrace, look_at_each
from mtppp.phases.run_directory import PLAN_FILE
from mtppp.plan import directories
from mtppp.plan.plan import Plan
from mtppp.runtime.runtime import runtime_of


class AssumeHosts(WithoutTrace):
    """What the file says of the hosts, in place of asking them."""

    title = "hosts"

    def run(self, deployment: Deployment, step: Step) -> None:
        cluster = deployment.cluster
        if deployment.not_here is not None:
            raise deployment.not_here
        if deployment.model is None:
            raise ConfigurationError(
                f"{cluster.model.id} is on the nodes only",
                hint="plan with --connect, or name its config.json here in model.config",
            )
        python = runtime_of(cluster).python(UNKNOWN_UID)
        deployment.facts = [
            HostFacts.assumed(
                node.address,
                python=f"<home>{python[1:]}" if python.startswith("~/") else python,
                vllm=cluster.runtime.vllm,
                gpus=[GpuFacts.of_type(node.gpu_type)] * node.gpus if node.gpu_type else (),
            )
            for node in cluster.nodes
        ]
        step.note = "not asked"


class AskHosts(WithoutTrace):
    """Facts of all hosts, whatever they are."""

    title = "hosts"

    def run(self, deployment: Deployment, step: Step) -> None:
        to_be_made = use_environment(deployment)
        deployment.facts = [
            _as_it_will_be(deployment.cluster, fact) if node.host in to_be_made else fact
            for node, fact in zip(deployment.nodes, gather(deployment), strict=True)
        ]
        deployment.running = is_running(deployment)
        step.note = "the deployment runs" if deployment.running else "the deployment does not run"
        if to_be_made:
            step.note += f"; a launch makes the environment on {', '.join(to_be_made)}"


def _as_it_will_be(cluster: Cluster, fact: HostFacts) -> HostFacts:
    """A host whose environment a launch has yet to make, with what the lock says of it."""
    runtime = runtime_of(cluster)
    assert runtime.lock is not None
    held = runtime.lock.versions
    versions = {"vllm": runtime.lock.vllm, "ray": held.get("ray"), "torch": held.get("torch")}
    return replace(fact, python=runtime.python(fact.uid), versions=versions)


WITHOUT_HOSTS: tuple[Phase, ...] = (ReadModel(), AssumeHosts(), ReviewPlan())
WITH_HOSTS: tuple[Phase, ...] = (ReadModel(), Connect(), AskHosts(), ReviewPlan())


def running_on(deployment: Deployment) -> list[bool]:
    """For each node, whether processes of the deployment run there."""
    found: dict[int, bool] = {}

    def look(index: int) -> None:
        processes = deployment.nodes[index].processes(_directory(deployment, index))
        found[index] = bool(processes["marked"])

    look_at_each(range(len(deployment.nodes)), look)
    return [found[index] for index in range(len(deployment.nodes))]


def running_plan(deployment: Deployment) -> Mapping[str, Any] | None:
    """The fields of the Plan that runs, as its nodes keep it; None when none runs.

    Raises:
        RemoteCommandFailed: a node runs it and has no Plan that can be read.
        MtpppError: two nodes have different ones.
    """
    plans: dict[str, dict[str, Any]] = {}
    for index, runs in enumerate(running_on(deployment)):
        if runs:
            node = deployment.nodes[index]
            path = f"{_directory(deployment, index)}/{PLAN_FILE}"
            plans[node.host] = _fields(node.host, path, node.read(path).get(path))
    first = next(iter(plans.values()), None)
    for host, plan in plans.items():
        if plan != first:
            raise MtpppError(
                f"{host} runs another Plan than {next(iter(plans))}",
                hint="`mtppp stop` and launch again",
            )
    return first


def _fields(host: str, path: str, text: str | None) -> dict[str, Any]:
    try:
        return Plan.fields_of(text or "")
    except ValueError:
        raise RemoteCommandFailed(host, f"{path} is no Plan") from None


def _directory(deployment: Deployment, index: int) -> str:
    return directories.run_directory(deployment.facts[index].uid, deployment.cluster.name, index)
