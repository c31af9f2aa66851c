"""What is known of a deployment that is verified, besides what its server says of itself."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from mtppp.model.config import semantic_hash
from mtppp.phases.deployment import Deployment
from mtppp.phases.facts import in_hub
from mtppp.phases.phase import look_at_each
from mtppp.verify.servers import NODES_DIFFER

_SHOWN = 12  # digits of a hash


def identity(deployment: Deployment) -> dict[str, Any]:
    """For a report: weights and configuration by their hashes, of every node; the server's command.

    The hash of weights is of names, sizes and headers of their files, not of the numbers in them.
    """
    model = deployment.cluster.model
    found: dict[int, Mapping[str, Any]] = {}
    plans: list[Mapping[str, Any]] = []

    def ask(index: int) -> None:
        node = deployment.nodes[index]
        path = model.id if model.is_path else None
        found[index] = node.weights(path, None if path else in_hub(deployment.cluster))
        if index == 0:
            plans.append(node.look(deployment.cluster.name, 0)["plan"] or {})

    look_at_each(range(len(deployment.nodes)), ask)
    hosts = [node.host for node in deployment.nodes]
    about = {
        "weights": _alike({host: _weights(found[i]) for i, host in enumerate(hosts)}),
        "config": _alike({host: _config(found[i]) for i, host in enumerate(hosts)}),
    }
    argv = plans[0].get("server", {}).get("argv", ())
    return {key: value for key, value in about.items() if value} | (
        {"argv": shlex.join(argv)} if argv else {}
    )


def _alike(values: Mapping[str, str]) -> str:
    """What all nodes have; which has what where they differ."""
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    each = ", ".join(f"{host} {value or 'none'}" for host, value in values.items())
    return f"{NODES_DIFFER}: {each}"


def _weights(found: Mapping[str, Any]) -> str:
    if not found["files"]:
        return ""
    size = f"{found['bytes'] / 2**30:.1f} GiB" if found["bytes"] >= 2**30 else "below 1 GiB"
    return f"{found['sha256'][:_SHOWN]} ({found['files']} files, {size})"


def _config(found: Mapping[str, Any]) -> str:
    return semantic_hash(found["config"])[:_SHOWN] if found["config"] else ""
