"""From a command's argument to a deployment with a transport to each of its nodes."""

from __future__ import annotations

import os
from pathlib import Path

from mtppp.cluster import Cluster, Node, load
from mtppp.errors import ConfigurationError
from mtppp.hosts import node as hosts
from mtppp.hosts.local import LocalTransport
from mtppp.hosts.ssh import SshTarget, SshTransport
from mtppp.hosts.transport import Transport
from mtppp.phases.deployment import Deployment


def from_file(file: Path) -> Deployment:
    """The deployment of a cluster file; nothing has been connected to yet.

    Raises:
        ConfigurationError: the file is invalid, or a secret that it names is not set.
    """
    loaded = load(file)
    cluster = loaded.cluster
    nodes = [hosts.Node(_transport(cluster, n), cluster.runtime.python) for n in cluster.nodes]
    return Deployment(cluster=cluster, nodes=nodes, secrets=_secrets(cluster, file))


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
            connect_timeout=ssh.connect_timeout,
        )
    )


def _secrets(cluster: Cluster, file: Path) -> dict[str, str]:
    missing = [name for name in cluster.secrets if name not in os.environ]
    if missing:
        raise ConfigurationError(
            f"{file}: secrets: {', '.join(missing)} is not set in your environment",
            hint=f"export {missing[0]}, or remove it from the file",
        )
    return {name: os.environ[name] for name in cluster.secrets}
