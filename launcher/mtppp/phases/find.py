"""Ask a host what was launched there, when nothing on the operator's side tells any more."""

from __future__ import annotations

from mtppp import state
from mtppp.hosts.node import Node
from mtppp.phases.run_directory import CLUSTER_FILE
from mtppp.plan import directories


def find(node: Node) -> list[state.Known]:
    """The deployments of this user that were launched with the host and not stopped.

    Raises:
        HostError: the host cannot be asked.
    """
    node.transport.connect()
    records = node.read(f"{directories.root(node.uid())}/*/*/{CLUSTER_FILE}")
    found = (state.parsed(text) for text in records.values())
    by_name = {known.cluster.name: known for known in found if known is not None}
    return [by_name[name] for name in sorted(by_name)]
