"""The lines of a deployment's logs, of all nodes, in the order of time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from mtppp.errors import MtpppError
from mtppp.phases.deployment import Deployment
from mtppp.phases.logs import error_lines
from mtppp.phases.phase import look_at_each
from mtppp.plan import directories

NAMES = ("server.log", "ray.log")
"""In a node's run directory; the server's on the first node only."""
_PROGRAMS = ("server", "ray")
_OF_EACH = 4
LIMIT = 1 << 20
"""Bytes of each log that are read at once."""

_WORLD_RANK = re.compile(r"\bworld_size=\d+ rank=(\d+) ")
_WORKER = re.compile(
    r"\(Worker(?:_DP\d+)?(?:_PP(?P<stage>\d+))?(?:_PCP\d+)?(?:_TP(?P<tensor>\d+))?"
)
# What Ray has sent from a worker to the server's log; the first node's have no address.
_SENT = re.compile(r"\((?:RayWorkerProc|\w*Worker\w*) pid=\d+(?:, ip=(?P<address>[^)]+))?\)(?: |$)")
_PID = re.compile(r"-(\d+)\.(?:out|err)$")
_MARKS = (":job_id:", ":actor_name:", ":task_name:")


@dataclass(frozen=True, slots=True)
class Line:
    """One line.

    Attributes:
        time: seconds since the epoch, by its node's clock.
        host: the node it was written on.
        source: "server", "ray", "rank 1", or "worker 4711" by its process while the rank is not
            known.
        rank: of the worker that wrote it; None for all others.
    """

    time: float
    host: str
    source: str
    rank: int | None
    text: str


@dataclass
class LogReader:
    """Reads the logs of a deployment; each time what has come since the time before.

    Attributes:
        since: seconds since the epoch; what is older is left out.
        nodes: indices of the nodes to read.
        problems: why a node could not be read the last time, by host.
        left_out: logs, as host:path, whose beginning was too long to be read.
    """

    deployment: Deployment
    nodes: Sequence[int]
    since: float = 0.0
    problems: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    _positions: dict[int, Mapping[str, Sequence[int]]] = field(default_factory=dict)
    _ranks: dict[tuple[int, str], int] = field(default_factory=dict)
    _uids: dict[int, int] = field(default_factory=dict)

    def read(self) -> list[Line]:
        """The lines that are new, of all nodes that can be read."""
        answers: dict[int, Mapping[str, Any]] = {}

        def ask(index: int) -> None:
            host = self.deployment.nodes[index].host
            try:
                answers[index] = self._ask(index)
                self.problems.pop(host, None)
            except MtpppError as error:
                self.problems[host] = error.message

        look_at_each(self.nodes, ask)
        for index, answer in answers.items():
            for log in answer["logs"]:
                self._learn_rank(index, log)
        lines = [
            line
            for index in sorted(answers)
            for log in answers[index]["logs"]
            for line in self._lines(index, log, set(answers))
        ]
        return sorted(lines, key=lambda line: line.time)

    def rank_of(self, index: int, process: str) -> int | None:
        """The rank that a process of a node is, once it was read that it said so."""
        return self._ranks.get((index, process))

    def _ask(self, index: int) -> Mapping[str, Any]:
        node = self.deployment.nodes[index]
        name = self.deployment.cluster.name
        if index not in self._uids:
            node.transport.connect()
            self._uids[index] = node.uid()
        answer = node.logs(
            directories.run_directory(self._uids[index], name, index),
            directories.ray_directory(self._uids[index], name, index),
            names=NAMES,
            since=self.since,
            limit=LIMIT,
            positions=self._positions.get(index, {}),
        )
        self._positions[index] = answer["positions"]
        return answer

    def _lines(self, index: int, log: Mapping[str, Any], read: set[int]) -> Iterator[Line]:
        host = self.deployment.nodes[index].host
        path = PurePosixPath(log["path"])
        if log["left_out"]:
            self.left_out.append(f"{host}:{path}")
        if path.name in NAMES:
            for time, text in log["lines"]:
                if not self._is_elsewhere(text, read):
                    rank = self._rank_of(text) if _SENT.match(text) else None
                    yield Line(time, host, path.stem, rank, text)
            return
        process = _process_of(path)
        rank = self._ranks.get((index, process))
        source = f"worker {process}" if rank is None else f"rank {rank}"
        for time, text in log["lines"]:
            if not text.startswith(_MARKS):
                yield Line(time, host, source, rank, text)

    def _learn_rank(self, index: int, log: Mapping[str, Any]) -> None:
        """What a worker's output says of its rank; its errors do not."""
        path = PurePosixPath(log["path"])
        key = (index, _process_of(path))
        if path.name in NAMES or key in self._ranks:
            return
        ranks = (self._rank_of(text) for _, text in log["lines"])
        rank = next((rank for rank in ranks if rank is not None), None)
        if rank is not None:
            self._ranks[key] = rank

    def _is_elsewhere(self, text: str, read: set[int]) -> bool:
        """Whether a line was sent to the server's log by a worker whose own log is read, too."""
        sent = _SENT.match(text)
        if sent is None:
            return False
        address = sent["address"]
        of = (i for i, node in enumerate(self.deployment.cluster.nodes) if node.address == address)
        return (0 if address is None else next(of, -1)) in read

    def _rank_of(self, text: str) -> int | None:
        if world := _WORLD_RANK.search(text):
            return int(world[1])
        worker = _WORKER.search(text)
        if worker is None or not (worker["stage"] or worker["tensor"]):
            return None
        tensor = self.deployment.cluster.parallel.tensor
        return int(worker["stage"] or 0) * tensor + int(worker["tensor"] or 0)


def lines_that_matter(lines: Sequence[Line], count: int) -> list[str]:
    """At most `count` lines that speak of an error, each with its node and rank; else the last.

    Ranks first: what went wrong in one is the cause of what the server says.
    """
    said: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        said.setdefault((line.host, line.source), []).append(line.text)
    order = sorted(said, key=lambda where: (where[1] in _PROGRAMS, where[1] == "ray"))
    errors = [
        f"{host} {source}: {text}"
        for host, source in order
        for text in error_lines("\n".join(said[host, source]), _OF_EACH)
    ]
    if errors:
        return errors[:count]
    return [f"{host} {source}: {said[host, source][-1]}" for host, source in order][:count]


def _process_of(path: PurePosixPath) -> str:
    """The process that writes a worker's log."""
    found = _PID.search(path.name)
    return found[1] if found else path.name
