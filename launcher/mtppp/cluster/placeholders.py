"""Values that `mtppp import` and `mtppp init` write where nobody said one.

Such a file is valid, so that it can be read and planned, and it must not be launched.
"""

from __future__ import annotations

import ipaddress

from mtppp.cluster.schema import Cluster

# Reserved for documentation (RFC 5737): the address of no host.
_BLOCK = ipaddress.ip_network("192.0.2.0/24")


def placeholder_address(index: int) -> str:
    """The address that holds the place of the node at `index`'s own."""
    return str(_BLOCK[index + 1])


def placeholders(cluster: Cluster) -> tuple[str, ...]:
    """One sentence for each key that still holds a placeholder."""
    return tuple(
        f"nodes[{index}].address: {node.address} only holds the place of {node.host}'s address on "
        "the network between the nodes"
        for index, node in enumerate(cluster.nodes)
        if ipaddress.ip_address(node.address) in _BLOCK
    )
