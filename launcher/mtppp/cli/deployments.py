"""From a command's argument to a deployment with a transport to each of its nodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from mtppp import state
from mtppp.cluster import Cluster, Node, load
from mtppp.console import Console
from mtppp.errors import ConfigurationError
from mtppp.hosts import node as hosts
from mtppp.hosts.local import LocalTransport
from mtppp.hosts.ssh import SshTarget, SshTransport
from mtppp.hosts.transport import Transport
from mtppp.phases.deployment import Deployment
from mtppp.phases.interrupts import Detached

DEFAULT_FILE = Path("cluster.yaml")


def complete_deployment(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """For a shell: the names of known deployments, then files."""
    names = [name for name in state.known() if name.startswith(incomplete)]
    return [*map(CompletionItem, names), CompletionItem(incomplete, type="file")]


deployment_argument = click.argument(
    "deployment", metavar="[FILE|NAME]", required=False, shell_complete=complete_deployment
)
"""The deployment that a command is about; see `resolve`."""


def resolve(argument: str | None) -> state.Known:
    """The deployment that an argument means: a cluster file, or the name of a known deployment.

    Without an argument: ./cluster.yaml, else the only deployment known.

    Raises:
        ConfigurationError: there is no such file or name, or the file is invalid.
    """
    if argument is None:
        return _default()
    # Path.is_file raises an error for what is too long to be a name.
    is_file = os.path.isfile(argument)  # noqa: PTH113
    if is_file or "/" in argument or argument.endswith((".yaml", ".yml")):
        return state.Known(load(Path(argument)).cluster, Path(argument))
    remembered = state.known()
    if argument in remembered:
        return remembered[argument]
    way_out = "give its cluster file, or have one of its hosts tell: mtppp list HOST"
    if argument in (unreadable := state.unreadable()):
        raise ConfigurationError(
            f"{unreadable[argument]}: what was remembered of {argument} cannot be read: it is"
            " damaged, or another mtppp's",
            hint=way_out,
        )
    raise ConfigurationError(
        f"{argument}: no such file, and no deployment of that name was launched from here",
        hint=(f"known are {', '.join(remembered)}; " if remembered else "") + way_out,
    )


def resolve_launched(argument: str | None) -> state.Known:
    """The same, for commands about what runs: a file must have the nodes that it was launched on.

    What runs on a node is found by its place in the file: with another order nothing would be.

    Raises:
        ConfigurationError: as `resolve`; or the file was given other nodes since the launch.
    """
    known = resolve(argument)
    cluster = known.cluster
    launched = state.known().get(cluster.name, known)
    before, now = ([n.host for n in c.nodes] for c in (launched.cluster, cluster))
    if before != now:
        raise ConfigurationError(
            f"{known.file} has the nodes {', '.join(now)}; {cluster.name} was launched from here on"
            f" {', '.join(before)}",
            hint=f"{cluster.name} in place of the file is as it was launched; if it was launched"
            f" from elsewhere since, `mtppp list {now[0]}` has the host tell",
        )
    return known


def no_more_in(known: state.Known) -> list[str]:
    """Hosts on which the deployment was launched from here, and which the file has no more."""
    launched = state.known().get(known.cluster.name, known)
    hosts = {node.host for node in known.cluster.nodes}
    return [node.host for node in launched.cluster.nodes if node.host not in hosts]


def _default() -> state.Known:
    if DEFAULT_FILE.is_file():
        return state.Known(load(DEFAULT_FILE).cluster, DEFAULT_FILE)
    remembered = state.known()
    if len(remembered) == 1:
        return next(iter(remembered.values()))
    raise ConfigurationError(
        f"there is no {DEFAULT_FILE} here, and {len(remembered)} deployments are known",
        hint=f"name one: {', '.join(remembered)}"
        if remembered
        else "make one: mtppp init, or mtppp import",
    )


def connectable(known: state.Known, *, with_secrets: bool = False) -> Deployment:
    """The deployment with transports to its nodes; nothing has been connected to yet.

    Args:
        with_secrets: require the file's secrets to be set, as a launch must.

    Raises:
        ConfigurationError: a secret that the file names is not set, or a key file is not there.
    """
    cluster = known.cluster
    for key_path, path in _key_files(cluster):
        if not path.is_file():
            raise ConfigurationError(
                f"{known.file}: {key_path}: there is no file {path}",
                hint="name a private key that is there, or leave it out: then the agent's keys and"
                " those of the ssh configuration are offered",
            )
    nodes = [hosts.Node(_transport(cluster, n), cluster.runtime.python) for n in cluster.nodes]
    secrets = _secrets(known) if with_secrets else _secrets_set(cluster)
    return Deployment(cluster=cluster, file=known.file, nodes=nodes, secrets=secrets)


def is_protected(known: state.Known) -> bool:
    """Whether the file says so, or did when it was launched from here."""
    launched = state.known().get(known.cluster.name, known)
    return known.cluster.protect or launched.cluster.protect


def confirm(known: state.Known, name: str | None) -> None:
    """Have the name of a protected deployment given, or typed at a terminal.

    Raises:
        ConfigurationError: it was not given, or is another one.
    """
    if not is_protected(known):
        return
    cluster = known.cluster
    if name is None and sys.stdin.isatty():
        name = click.prompt(f"{cluster.name} is protected; its name, to go on", err=True)
    if name != cluster.name:
        raise ConfigurationError(
            f"{cluster.name} is protected: nothing was stopped",
            hint=f"to stop it all the same: --yes {cluster.name}",
        )


@contextmanager
def working_on(target: Deployment, console: Console) -> Iterator[None]:
    """Close the connections after the block; of one that let go, say how to go on.

    Interrupted, they are left to the end of the process: closing one waits for what it is doing.
    """
    try:
        yield
    except Detached:
        # Its name is known here only from when something of it could run.
        name = target.cluster.name
        known = name if name in state.known() else target.file
        console.say(
            f"left as it is: `mtppp status {known}` says what runs, `mtppp stop {known}` ends it,"
            f" `mtppp launch {target.file}` goes on"
        )
        raise
    except KeyboardInterrupt:
        raise
    except BaseException:
        target.close()
        raise
    target.close()


def _key_files(cluster: Cluster) -> Iterator[tuple[str, Path]]:
    """The key files that connecting would offer, each with where the file names it."""
    by_ssh = [node.transport != "local" for node in cluster.nodes]
    if cluster.ssh.identity_file is not None and any(by_ssh):
        yield "ssh.identity_file", cluster.ssh.identity_file.expanduser()
    for index, node in enumerate(cluster.nodes):
        if node.identity_file is not None:
            yield f"nodes[{index}].identity_file", node.identity_file.expanduser()


def _transport(cluster: Cluster, node: Node) -> Transport:
    if node.transport == "local":
        return LocalTransport(node.host)
    ssh = cluster.ssh
    return SshTransport(
        SshTarget(
            host=node.host,
            user=node.user or ssh.user,
            port=node.port or ssh.port,
            identity_file=node.identity_file or ssh.identity_file,
            config_file=ssh.config_file,
            known_hosts=ssh.known_hosts,
            proxy_jump=node.proxy_jump or ssh.proxy_jump,
            connect_timeout=ssh.connect_timeout,
        )
    )


def _secrets_set(cluster: Cluster) -> dict[str, str]:
    """Those of the file's secrets that are set; a server may want its key to answer."""
    return {name: os.environ[name] for name in cluster.secrets if name in os.environ}


def _secrets(known: state.Known) -> dict[str, str]:
    names = known.cluster.secrets
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ConfigurationError(
            f"{known.file}: secrets: {', '.join(missing)} is not set in your environment",
            hint=f"export {missing[0]}, or remove it from the file",
        )
    return {name: os.environ[name] for name in names}
