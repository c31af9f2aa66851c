"""What runs of a deployment, as its nodes and its server say it now.

The nodes' own records are what counts; the operator's side adds nothing but where to ask. A node
that cannot be reached is reported as such and hides no other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mtppp.engine.client import EngineClient, EngineError
from mtppp.errors import HostError, MtpppError
from mtppp.hosts.node import Node
from mtppp.phases.deployment import Deployment
from mtppp.phases.phase import look_at_each
from mtppp.phases.reach import reachable_from_here
from mtppp.phases.run_directory import LAUNCH_FILE, PLAN_FILE
from mtppp.plan import directories

HEALTH_DEADLINE = 20.0
"""Seconds in which a healthy server must have generated one token."""

State = Literal["serving", "starting", "hung", "broken", "stopped", "unknown"]
"""`serving`: everything is there and a token came. `starting`: everything is there and the server
is not ready. `hung`: it says it is healthy, and no token comes. `broken`: something of it is gone.
`stopped`: nothing of it runs. `unknown`: a node could not be asked and the others do not decide."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node.

    Attributes:
        host: the node, as the file calls it.
        problem: why it could not be asked; "" when it was.
        by, since: who launched the deployment and when; "" when nothing runs there.
        processes: role of each recorded process, and whether it lives.
        marked: number of live processes of the deployment.
    """

    host: str
    problem: str
    by: str = ""
    since: str = ""
    processes: Mapping[str, bool] | None = None
    marked: int = 0


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    """A deployment.

    Attributes:
        name: the deployment's.
        state: serving, starting, hung, broken, stopped or unknown.
        explanation: what `state` rests on, one sentence.
        endpoint: base URL of its API; "" when nothing is known to run.
        reachable: whether a client on the operator's machine finds the model there.
        asked: the way by which the server was asked, in words.
        seconds_to_token: how long one token took; None when none came.
        evidence, at_own_risk: of the Plan that was launched.
        nodes: each node, in the order of the file.
        ranks: what each rank attested, by rank.
    """

    name: str
    state: State
    explanation: str
    endpoint: str
    reachable: bool
    asked: str
    seconds_to_token: float | None
    evidence: str
    at_own_risk: Sequence[str]
    nodes: Sequence[NodeStatus]
    ranks: Sequence[Mapping[str, Any]]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


@dataclass(frozen=True, slots=True)
class _Answer:
    status: NodeStatus
    plan: Mapping[str, Any] | None
    attested: Sequence[Mapping[str, Any]]


def ask(deployment: Deployment) -> DeploymentStatus:
    """Ask all nodes at once, then the server for a token."""
    name = deployment.cluster.name
    answered: dict[int, _Answer] = {}

    def ask_node(index: int) -> None:
        answered[index] = _ask_node(name, index, deployment.nodes[index])

    look_at_each(range(len(deployment.nodes)), ask_node)
    answers = [answered[index] for index in range(len(deployment.nodes))]
    plan = next((answer.plan for answer in answers if answer.plan is not None), None)
    nodes = [answer.status for answer in answers]
    state, explanation, seconds = _judge(deployment, nodes, plan)
    endpoint = plan["endpoint"] if plan and state not in ("stopped", "unknown") else ""
    return DeploymentStatus(
        name=name,
        state=state,
        explanation=explanation,
        endpoint=endpoint,
        reachable=bool(endpoint and plan and reachable_from_here(endpoint, plan["served_name"])),
        asked=str(deployment.way(endpoint)) if endpoint and not nodes[0].problem else "",
        seconds_to_token=seconds,
        evidence=plan["evidence"] if plan and state != "stopped" else "",
        at_own_risk=plan["at_own_risk"] if plan else (),
        nodes=nodes,
        ranks=sorted(
            (record for answer in answers for record in answer.attested),
            key=lambda record: int(record["rank"]),
        ),
    )


def _ask_node(name: str, index: int, node: Node) -> _Answer:
    try:
        node.transport.connect()
        directory = directories.run_directory(node.uid(), name, index)
        found = node.processes(directory)
        records = node.read(f"{directory}/*.json")
        attested = node.read(f"{directory}/attest/rank-*.json")
    except MtpppError as error:
        return _Answer(NodeStatus(node.host, problem=error.message), None, ())
    launched = json.loads(records.get(f"{directory}/{LAUNCH_FILE}", "{}"))
    plan = records.get(f"{directory}/{PLAN_FILE}")
    status = NodeStatus(
        node.host,
        problem="",
        by=launched.get("by", ""),
        since=launched.get("since", ""),
        processes={entry["role"]: entry["alive"] for entry in found["recorded"]},
        marked=len(found["marked"]),
    )
    return _Answer(
        status,
        json.loads(plan) if plan else None,
        [{"node": node.host, **json.loads(text)} for text in attested.values()],
    )


def _judge(
    deployment: Deployment, nodes: Sequence[NodeStatus], plan: Mapping[str, Any] | None
) -> tuple[State, str, float | None]:
    unreachable = [node.host for node in nodes if node.problem]
    gone = [
        f"{role} on {node.host}"
        for node in nodes
        for role, alive in (node.processes or {}).items()
        if not alive
    ]
    running = any(node.marked for node in nodes)
    idle = [node.host for node in nodes if not node.problem and not node.processes]
    if not running and not gone:
        if unreachable:
            return "unknown", f"{', '.join(unreachable)} could not be asked", None
        return "stopped", "no process of it runs", None
    if gone:
        return "broken", f"{', '.join(gone)} has ended", None
    if idle:
        return "broken", f"nothing of it runs on {', '.join(idle)}", None
    if "server" not in (nodes[0].processes or {}) and not nodes[0].problem:
        return "starting", "the server has not been started", None
    assert plan is not None
    return _ask_server(deployment, plan, unreachable)


def _ask_server(
    deployment: Deployment, plan: Mapping[str, Any], unreachable: Sequence[str]
) -> tuple[State, str, float | None]:
    beside = f"; {', '.join(unreachable)} could not be asked" if unreachable else ""
    client = _client(deployment, plan["endpoint"])
    try:
        if not client.healthy():
            return "starting", f"the server is not ready{beside}", None
        started = time.monotonic()
        client.complete(plan["served_name"], "1", max_tokens=1, temperature=0)
        return "serving", f"a token came{beside}", round(time.monotonic() - started, 3)
    except EngineError as error:
        return "hung", f"the server says it is healthy, but: {error.message}{beside}", None
    finally:
        client.close()


def _client(deployment: Deployment, endpoint: str) -> EngineClient:
    try:
        look_at_each([endpoint], deployment.way)
        return deployment.engine(endpoint, timeout=HEALTH_DEADLINE)
    except HostError:  # the server may still be up when its node's sshd is not
        return EngineClient(endpoint, timeout=HEALTH_DEADLINE)
