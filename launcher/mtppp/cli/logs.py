"""`mtppp logs`"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime

import click

from mtppp.cli.deployments import connectable, deployment_argument, resolve_launched
from mtppp.cluster import Cluster
from mtppp.console import Console
from mtppp.errors import ConfigurationError, MtpppError
from mtppp.phases.read_logs import Line, LogReader

_POLL = 1.0
_AGO = re.compile(r"(\d{1,9})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@click.command(name="logs")
@deployment_argument
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written, until Ctrl-C.")
@click.option("--node", metavar="HOST", help="Only what was written on this node.")
@click.option("--rank", type=click.IntRange(0), help="Only what this rank wrote.")
@click.option("--since", metavar="TIME", help="Such as 90s, 10m, 2h, 1d, or 2026-11-29T14:30:00.")
def command(
    deployment: str | None, follow: bool, node: str | None, rank: int | None, since: str | None
) -> None:
    """Print what the server, Ray and every rank wrote, of all nodes, in the order of time.

    Each line begins with where it is from. Without -f, of each log the last megabyte. They stay
    after a stop, until the next launch. Times are those of the nodes' clocks.
    """
    console = Console()
    known = resolve_launched(deployment)
    _check_rank(known.cluster, rank)
    target = connectable(known)
    with closing(target):
        reader = LogReader(target, _nodes(known.cluster, node), since=_since(since))
        told: dict[str, str] = {}
        lines = reader.read()
        _print(lines, rank)
        if rank is not None and all(line.rank != rank for line in lines):
            console.say(
                f"no line is known to be of rank {rank}: without --rank, one that ended"
                " before it said its rank is a worker by its process"
            )
        for log in reader.left_out:
            console.say(f"the beginning was left out: {log}")
        _tell(console, reader, told)
        if not follow and len(reader.problems) == len(reader.nodes):
            raise MtpppError(
                "no node could be asked", hint=f"`mtppp status {known.cluster.name}` says why"
            )
        while follow:
            time.sleep(_POLL)
            _print(reader.read(), rank)
            _tell(console, reader, told)


def _tell(console: Console, reader: LogReader, told: dict[str, str]) -> None:
    """Say what is new of nodes that cannot be read."""
    for host, problem in reader.problems.items():
        if host not in told:
            console.say(f"{host} cannot be read: {problem.removeprefix(f'{host}: ')}")
    for host in told.keys() - reader.problems.keys():
        console.say(f"{host} can be read again")
    told.clear()
    told.update(reader.problems)


def _print(lines: Sequence[Line], rank: int | None) -> None:
    for line in lines:
        if rank is None or line.rank == rank:
            click.echo(f"{line.host} {line.source} | {line.text}")


def _nodes(cluster: Cluster, host: str | None) -> Sequence[int]:
    hosts = [node.host for node in cluster.nodes]
    if host is None:
        return range(len(hosts))
    if host not in hosts:
        raise ConfigurationError(
            f"{cluster.name} has no node {host}", hint=f"its nodes are {', '.join(hosts)}"
        )
    return [hosts.index(host)]


def _check_rank(cluster: Cluster, rank: int | None) -> None:
    ranks = cluster.parallel.tensor * cluster.parallel.pipeline
    if rank is not None and rank >= ranks:
        raise ConfigurationError(
            f"{cluster.name} has no rank {rank}", hint=f"its ranks are 0 to {ranks - 1}"
        )


def _since(text: str | None) -> float:
    """Seconds since the epoch."""
    if text is None:
        return 0.0
    if ago := _AGO.fullmatch(text):
        return time.time() - int(ago[1]) * _SECONDS[ago[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ConfigurationError(
            f"--since {text}: no time", hint="such as 90s, 10m, 2h, 1d, or 2026-11-29T14:30:00"
        ) from None
