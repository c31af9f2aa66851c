"""What runs of a deployment, as its nodes and its server say it now.

The nodes' own records are what counts; the operator's side adds nothing but where to ask. A node
that cannot be reached is reported as such and hides no other.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mtppp.engine.client import BadAnswer, EngineClient, EngineError
from mtppp.errors import HostError, MtpppError
from mtppp.hosts.lock import in_words
from mtppp.hosts.node import Node
from mtppp.phases.deployment import Deployment
from mtppp.phases.gate import Gate
from mtppp.phases.phase import look_at_each
from mtppp.phases.reach import reachable_from_here
from mtppp.plan.build import SERVER

HEALTH_DEADLINE = 20.0
"""Seconds in which a healthy server must have generated one token."""

HELD = "others get 503, for nothing has shown yet that it is right"

State = Literal[
    "serving", "gated", "wrong", "starting", "stopping", "hung", "broken", "stopped", "unknown"
]
"""`serving`: everything is there and a token came. `gated`: the same, and requests of others are
held until it was verified. `wrong`: a token came, and the ranks were seen not to compute one model.
`starting`: it is being launched, or everything is there and the server has not been ready yet.
`stopping`: it is being stopped. `hung`: everything is there, the server says it is healthy or was
ready once, and no token comes.
`broken`: something of it is gone. `stopped`: nothing of it runs. `unknown`: a node could not be
asked and the others do not decide, or the server wants a key that is not known here."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node.

    Attributes:
        host: the node, as the file calls it.
        problem: why it could not be asked; "" when it was.
        hint: what to do about `problem`; "" when there is nothing useful to say.
        by, since: who launched the deployment and when; "" when nothing runs there.
        processes: role of each recorded process, and whether it lives.
        marked: number of live processes of the deployment.
        suspended: those of them that a signal has stopped.
        gpu_memory: bytes of GPU memory that they hold; None where nobody can say.
        work: who works on it now, and since when; "" when nobody does.
        doing: the command of who does: launch, stop, open; "" when nobody does.
    """

    host: str
    problem: str
    hint: str = ""
    by: str = ""
    since: str = ""
    processes: Mapping[str, bool] | None = None
    marked: int = 0
    suspended: Sequence[str] = ()
    gpu_memory: int | None = None
    work: str = ""
    doing: str = ""


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    """A deployment.

    Attributes:
        name: the deployment's.
        state: serving, gated, wrong, starting, stopping, hung, broken, stopped or unknown.
        explanation: what `state` rests on, one sentence.
        checked: when a launch had checked every rank and seen tokens; "" when none has.
        gate: "open", or "closed" while requests of others are held until it was verified; "" when
            nothing runs or nothing holds them.
        gate_why: why it is open, by whom and since when; "" otherwise.
        endpoint: base URL of its API; "" when nothing is known to run.
        reachable: whether a client on the operator's machine finds the model there.
        asked: the way by which the server was asked, in words.
        seconds_to_token: how long one token took; None when none came.
        evidence, at_own_risk: of the Plan that was launched.
        invariants: what a violated one does, "count" or "stop"; "off" where none is watched; ""
            when nothing runs.
        violations: how often each invariant did not hold since the server started; of those alone
            that did not.
        violated: the latest of these violations: which invariant, in which step, on which ranks.
        nodes: each node, in the order of the file.
        ranks: what each rank attested, by rank; `alive` says whether its process still lives.
    """

    name: str
    state: State
    explanation: str
    checked: str
    gate: str
    gate_why: str
    endpoint: str
    reachable: bool
    asked: str
    seconds_to_token: float | None
    evidence: str
    at_own_risk: Sequence[str]
    invariants: str
    violations: Mapping[str, int]
    violated: Sequence[str]
    nodes: Sequence[NodeStatus]
    ranks: Sequence[Mapping[str, Any]]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


@dataclass(frozen=True, slots=True)
class _Answer:
    status: NodeStatus
    plan: Mapping[str, Any] | None = None
    checked: str = ""
    attested: Sequence[Mapping[str, Any]] = ()
    invariants: Mapping[str, Any] | None = None
    gate: Gate | None = None


@dataclass(frozen=True, slots=True)
class _Verdict:
    state: State
    explanation: str
    seconds: float | None = None


def ask(deployment: Deployment) -> DeploymentStatus:
    """Ask all nodes at once, then the server for a token."""
    name = deployment.cluster.name
    answered: dict[int, _Answer] = {}

    def ask_node(index: int) -> None:
        answered[index] = _ask_node(name, index, deployment.nodes[index])

    look_at_each(range(len(deployment.nodes)), ask_node)
    answers = [answered[index] for index in range(len(deployment.nodes))]
    plan = next((answer.plan for answer in answers if answer.plan is not None), None)
    ranks = sorted(
        (record for answer in answers for record in answer.attested),
        key=lambda record: int(record["rank"]),
    )
    nodes = [answer.status for answer in answers]
    gate = answers[0].gate if plan and plan.get("gate") else None
    deployment.gate_key = gate.key if gate else ""
    verdict = _judge(deployment, nodes, ranks, plan, was_ready=bool(answers[0].checked))
    violations, violated = _violations(answers) if verdict.state != "stopped" else ({}, [])
    if violations:
        verdict = _violated(verdict, violations, violated)
    runs = verdict.state not in ("stopped", "unknown") or any(node.marked for node in nodes)
    if gate and not gate.opened and verdict.state == "serving":
        verdict = _Verdict("gated", f"{verdict.explanation}; {HELD}", verdict.seconds)
    endpoint = plan["endpoint"] if plan and runs else ""
    return DeploymentStatus(
        name=name,
        state=verdict.state,
        explanation=verdict.explanation,
        checked=answers[0].checked,
        gate=("open" if gate.opened else "closed") if gate and runs else "",
        gate_why=gate.why if gate and runs else "",
        endpoint=endpoint,
        reachable=bool(endpoint and plan and reachable_from_here(endpoint, plan["served_name"])),
        asked=str(deployment.way(endpoint)) if endpoint and not nodes[0].problem else "",
        seconds_to_token=verdict.seconds,
        evidence=plan["evidence"] if plan and runs else "",
        at_own_risk=plan["at_own_risk"] if plan else (),
        invariants=plan["invariants"] if plan and runs else "",
        violations=violations,
        violated=violated,
        nodes=nodes,
        ranks=ranks,
    )


def _ask_node(name: str, index: int, node: Node) -> _Answer:
    try:
        node.transport.connect()
        found = node.look(name, index)
    except MtpppError as error:
        return _Answer(NodeStatus(node.host, problem=error.message, hint=error.hint))
    runs, held = found["recorded"] or found["marked"], found["held_by"]
    launched = (found["launch"] or {}) if runs else {}
    status = NodeStatus(
        node.host,
        problem="",
        by=launched.get("by", ""),
        since=launched.get("since", ""),
        processes={entry["role"]: entry["alive"] for entry in found["recorded"]},
        marked=found["marked"],
        suspended=[f"{each['pid']} {each['command']}" for each in found["suspended"]],
        gpu_memory=found["gpu_memory"],
        work=in_words(held) if held else "",
        doing=held["what"] if held else "",
    )
    return _Answer(
        status,
        found["plan"],
        (found["checked"] or {}).get("at", ""),
        [{**record, "node": node.host} for record in found["attested"]],
        found["invariants"],
        Gate.found(found) if index == 0 else None,
    )


def _violations(answers: Sequence[_Answer]) -> tuple[dict[str, int], list[str]]:
    """What the engine counted, on whichever node it runs."""
    counted: Counter[str] = Counter()
    latest: list[str] = []
    for answer in answers:
        if answer.invariants is not None:
            counted.update(answer.invariants["violations"])
            latest += answer.invariants["latest"]
    return {name: times for name, times in counted.items() if times}, latest


def in_times(times: int) -> str:
    """How often, in words."""
    return "once" if times == 1 else f"{times} times"


def _violated(
    verdict: _Verdict, violations: Mapping[str, int], violated: Sequence[str]
) -> _Verdict:
    times = sum(violations.values())
    state = "wrong" if verdict.state == "serving" else verdict.state
    explanation = (
        f"its ranks did not compute one model, {in_times(times)}, lastly: "
        f"{violated[-1]}; {verdict.explanation}"
    )
    return _Verdict(state, explanation, verdict.seconds)


def _judge(
    deployment: Deployment,
    nodes: Sequence[NodeStatus],
    ranks: Sequence[Mapping[str, Any]],
    plan: Mapping[str, Any] | None,
    *,
    was_ready: bool,
) -> _Verdict:
    worked_on = next((node for node in nodes if node.doing in ("launch", "stop")), None)
    if worked_on is not None and worked_on.doing == "stop":
        return _Verdict("stopping", worked_on.work)
    unreachable = [node.host for node in nodes if node.problem]
    beside = f"{', '.join(unreachable)} could not be asked" if unreachable else ""
    missing = list(_missing(nodes, ranks))
    if not missing and not any(node.marked for node in nodes):
        if worked_on is not None:
            return _Verdict("starting", worked_on.work)
        return _Verdict("unknown", beside) if beside else _Verdict("stopped", "nothing of it runs")
    if missing and worked_on is not None:
        return _Verdict("starting", worked_on.work)
    if missing or plan is None:
        missing = missing or ["it has no Plan on any node"]
        return _Verdict("broken", "; ".join([*missing, *([beside] if beside else [])]))
    verdict = _ask_server(deployment, plan, was_ready=was_ready)
    explanation = "; ".join(
        [
            verdict.explanation,
            *(f"{node.host}: suspended: {', '.join(node.suspended)}" for node in _suspended(nodes)),
            *([beside] if beside else []),
        ]
    )
    state = verdict.state
    if state == "hung" and unreachable:
        state = "broken"
    if state == "starting" and nodes[0].problem:
        state = "unknown"
    return _Verdict(state, explanation, verdict.seconds)


def _missing(nodes: Sequence[NodeStatus], ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What should run and does not; nothing when nothing of the deployment does."""
    if not any(node.processes or node.marked for node in nodes):
        return
    for node in nodes:
        for role, alive in (node.processes or {}).items():
            if not alive:
                yield f"{role} on {node.host} has ended"
        if not node.problem and not node.processes:
            yield f"nothing of it was started on {node.host}"
    if not nodes[0].problem and nodes[0].processes and SERVER not in nodes[0].processes:
        yield "the server was never started"
    for record in ranks:
        if not record["alive"]:
            yield f"rank {record['rank']} on {record['node']} has ended"


def _suspended(nodes: Sequence[NodeStatus]) -> list[NodeStatus]:
    return [node for node in nodes if node.suspended]


def _ask_server(deployment: Deployment, plan: Mapping[str, Any], *, was_ready: bool) -> _Verdict:
    with _client(deployment, plan["endpoint"]) as client:
        says = "the server says it is healthy, but"
        if not client.healthy():
            if not was_ready:
                return _Verdict("starting", "the server is not ready")
            says = "the server was ready, and is not any more"
        started = time.monotonic()
        generated = _generated(client)
        try:
            client.complete(plan["served_name"], "1", max_tokens=1, temperature=0)
        except BadAnswer as error:
            if error.gated or error.status in (401, 403):
                return _Verdict("unknown", f"the server answers, but {_why_not(deployment, error)}")
            return _Verdict("hung", f"{says}: {error.message}")
        except EngineError as error:
            # Behind a long queue ours may wait, but then others are served.
            if _generated(client) > generated:
                busy = f"it is busy: in {HEALTH_DEADLINE:g} s tokens came for others, not for us"
                return _Verdict("serving", busy)
            return _Verdict("hung", f"{says}: {error.message}")
        return _Verdict("serving", "a token came", round(time.monotonic() - started, 3))


def _why_not(deployment: Deployment, error: BadAnswer) -> str:
    if error.gated:
        return "holds requests, and its first node does not say how to be let through"
    if deployment.authorization:
        return "not to the VLLM_API_KEY of this environment: it was launched with another"
    return "its key is not known here: export VLLM_API_KEY, listed under secrets"


def _generated(client: EngineClient) -> int:
    """Tokens that the server has generated for anybody; 0 where it does not say."""
    try:
        return client.generated_tokens()
    except EngineError:
        return 0


def _client(deployment: Deployment, endpoint: str) -> EngineClient:
    try:
        look_at_each([endpoint], deployment.way)
        return deployment.engine(endpoint, timeout=HEALTH_DEADLINE)
    except HostError:  # the server may still be up when its node's sshd is not
        return EngineClient(endpoint, timeout=HEALTH_DEADLINE, headers=deployment.authorization)
