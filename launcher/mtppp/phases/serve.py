"""Start the server on the first node and wait until it is ready, dead, or stuck."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from mtppp.console import Step
from mtppp.engine.client import EngineClient
from mtppp.errors import HostTimeout, RemoteCommandFailed
from mtppp.hosts.node import Node
from mtppp.phases.deployment import Deployment
from mtppp.phases.logs import FailedRank, failed_rank, latest_words, stage_of_start
from mtppp.phases.phase import Starts, WithoutTrace, look_at_each, on_each
from mtppp.phases.read_logs import LogReader, lines_that_matter
from mtppp.plan.build import SERVER
from mtppp.plan.plan import NodePlan, Plan

_POLL = 1.0  # seconds between two looks at a loading server
_SHOWN = 12  # lines of logs in an error
_LOOK_AT_NODES = 5.0  # seconds between two questions over ssh


class StartServer(Starts, WithoutTrace):
    """`vllm serve`. Its end is that of its node: see StartRay.clean_up."""

    title = "server"

    def run(self, deployment: Deployment, step: Step) -> None:
        command = deployment.plan.server

        def start(member: tuple[Node, NodePlan]) -> None:
            node, planned = member
            node.start(
                role=command.role,
                argv=command.argv,
                env=deployment.environment(command),
                directory=planned.directory,
                log=command.log,
            )

        on_each([deployment.head], start)
        node, planned = deployment.head
        step.note = f"log {node.host}:{planned.directory}/{command.log}"


class WaitUntilReady(WithoutTrace):
    """Until /health says so. A process that died is noticed within seconds; a launch that makes
    no progress is given up, one that is slow is not."""

    title = "ready"

    def run(self, deployment: Deployment, step: Step) -> None:
        endpoint = deployment.plan.endpoint
        look_at_each([endpoint], deployment.way)
        with deployment.engine(endpoint) as client:
            _wait(deployment, client, step)
        step.note = f"{endpoint}, asked {deployment.way(endpoint)}"


def _wait(deployment: Deployment, client: EngineClient, step: Step) -> None:
    stall = deployment.cluster.serve.stall_timeout
    log = ""
    looked = grown = time.monotonic()
    while not client.healthy():
        now = time.monotonic()
        if now - looked >= _LOOK_AT_NODES:
            looked = now
            look_at_each(deployment.members, partial(check_alive, deployment))
            log, before = server_log(deployment), log
            grown = now if latest_words(log) != latest_words(before) else grown
            step.progress(stage_of_start(log))
        if now - grown > stall:
            raise HostTimeout(
                deployment.head[0].host,
                f"the server's log has said nothing new for {stall} s, and it is not ready",
                hint="it hangs, or is busy without a word: then raise serve.stall_timeout",
                details=matter(deployment),
            )
        time.sleep(_POLL)


def check_alive(deployment: Deployment, member: tuple[Node, NodePlan]) -> None:
    """Fail when a process that was started on a node has ended.

    Raises:
        RemoteCommandFailed: saying which, where, and the lines of its log that matter. Of a server
            that ended because a rank's process did, that rank.
    """
    node, planned = member
    for entry in node.processes(planned.directory)["recorded"]:
        if entry["alive"]:
            continue
        raise _ended(deployment, node.host, entry)


def _ended(deployment: Deployment, host: str, entry: Mapping[str, Any]) -> RemoteCommandFailed:
    """What to say of a process that has ended.

    Args:
        entry: what its node has recorded of it.
    """
    logs = LogReader(deployment, range(len(deployment.nodes)))
    details = lines_that_matter(logs.read(), _SHOWN)
    what = "vLLM's server ended" if entry["role"] == SERVER else "Ray ended"
    hint = f"the whole log is {entry['log']} on {host}"
    failed = _failed_rank(deployment) if entry["role"] == SERVER else None
    place = _place(deployment.plan, logs, failed) if failed is not None else None
    if failed is not None and place is not None:
        rank, node = place
        what, host = f"{rank} {'failed' if failed.raised else 'ended'}", node.host
        if not failed.raised:
            hint = (
                "its process was killed, perhaps by the kernel for want of memory, or it crashed:"
                f" see `dmesg -T` there, and `mtppp logs {deployment.file} --node {host}`; {hint}"
            )
    return RemoteCommandFailed(
        host, f"{what} while the deployment was starting", hint=hint, details=details
    )


def _failed_rank(deployment: Deployment) -> FailedRank | None:
    return failed_rank(server_log(deployment), deployment.plan.tensor)


def _place(plan: Plan, logs: LogReader, failed: FailedRank) -> tuple[str, NodePlan] | None:
    """What a rank is called, and its node; None where the Plan has no such rank or node."""
    node = {node.address: node for node in plan.nodes}.get(failed.address)
    rank = failed.rank if node is None else logs.rank_of(node.index, failed.process)
    if rank is not None and rank < len(plan.ranks):
        return f"rank {rank}", plan.nodes[plan.ranks[rank].node]
    return None if node is None else ("a rank", node)


def matter(deployment: Deployment) -> list[str]:
    """The lines of all logs that matter, with node and rank."""
    lines = LogReader(deployment, range(len(deployment.nodes))).read()
    return lines_that_matter(lines, _SHOWN)


def server_log(deployment: Deployment) -> str:
    """The end of the server's log; Ray sends the workers' output there, too."""
    logs: list[str] = []
    look_at_each(
        [deployment.head],
        lambda member: logs.append(_log(*member, deployment.plan.server.log)),
    )
    return logs[0]


def _log(node: Node, planned: NodePlan, name: str) -> str:
    return "".join(node.read(f"{planned.directory}/{name}", limit=1 << 18).values())
