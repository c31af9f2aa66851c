"""Which command is which node's, and what the nodes are."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from mtppp.cluster.placeholders import placeholder_address
from mtppp.errors import ConfigurationError, Refused
from mtppp.importer.commands import ServeCommand
from mtppp.importer.draft import Draft, NodeDraft
from mtppp.importer.flags import Parsed
from mtppp.importer.wishes import Wishes

PER_NODE = frozenset({"node-rank", "headless", "host", "port", "master-addr", "master-port"})
"""Flags in which the commands of one deployment's nodes may differ."""

# What only the API server reads, a headless node's command may leave out.
_SERVER_ONLY = frozenset(
    {
        *("api-key", "api-server-count", "chat-template", "enable-auto-tool-choice"),
        *("reasoning-parser", "served-model-name", "tool-call-parser"),
    }
)


def head_of(commands: Sequence[ServeCommand], parsed: Sequence[Parsed]) -> int:
    """The command of the first node.

    Raises:
        ConfigurationError: these are several deployments.
        Refused: the nodes' commands differ in what must be the same.
    """
    if len(commands) == 1:
        return 0
    ranks = [_rank(flags) for flags in parsed]
    headless = ["headless" in flags.flags for flags in parsed]
    if None in ranks and not any(headless):
        places = ", ".join(command.where for command in commands)
        raise ConfigurationError(
            f"{len(commands)} commands serve a model ({places}), and no --node-rank says that they "
            "are nodes of one deployment",
            hint="import them one at a time",
        )
    if len(set(ranks)) < len(ranks) and None not in ranks:
        raise ConfigurationError(
            f"--node-rank is {', '.join(map(str, ranks))}: two commands are the same node",
            hint="give one command per node",
        )
    if 0 not in ranks and all(headless):
        raise ConfigurationError(
            "the command of the first node (--node-rank 0) is missing: all of these are headless",
            hint="import it with the others; it has the API server's flags",
        )
    head = ranks.index(0) if 0 in ranks else headless.index(False)
    differences = [
        difference
        for index, flags in enumerate(parsed)
        if index != head
        for difference in _differences(
            parsed[head], flags, commands[head].where, commands[index].where
        )
    ]
    if differences:
        raise Refused(
            f"the nodes' commands differ: {differences[0]}",
            details=differences[1:],
            hint="all nodes must have the same flags but for "
            + ", ".join(f"--{name}" for name in sorted(PER_NODE)),
        )
    return head


def _rank(flags: Parsed) -> int | None:
    given = flags.flags.get("node-rank")
    return given.value if given and isinstance(given.value, int) else None


def _differences(one: Parsed, other: Parsed, here: str, there: str) -> list[str]:
    def shared(flags: Parsed) -> dict[str, Any]:
        values = {name: given.value for name, given in flags.flags.items() if name not in PER_NODE}
        return values | {"MODEL": flags.model.text if flags.model else values.get("model")}

    first, second = shared(one), shared(other)
    return [
        f"{name} is {_said(first, name)} at {here}, {_said(second, name)} at {there}"
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name)
        and not ("headless" in other.flags and name not in second and name in _SERVER_ONLY)
    ]


def _said(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "not given"


def node_count(flags: Parsed, wishes: Wishes, commands: int) -> int:
    given = flags.flags.get("nnodes")
    said = given.value if given and isinstance(given.value, int) else None
    if wishes.nodes and said is not None and said != len(wishes.nodes):
        raise ConfigurationError(
            f"the command is for {said} nodes (--nnodes), and {len(wishes.nodes)} are named",
            hint="give --node once for each node, in pipeline order",
        )
    if said is not None and commands > said:
        raise ConfigurationError(f"there are {commands} commands for --nnodes {said}")
    return (
        len(wishes.nodes) or said or (commands if commands > 1 else _nodes_of_stages(flags, wishes))
    )


def _nodes_of_stages(flags: Parsed, wishes: Wishes) -> int:
    """Nodes where nobody says how many: one for each stage, fewer where several fit on one."""
    stages = _size(flags, "pipeline-parallel-size")
    on_each = (wishes.gpus or 1) // _size(flags, "tensor-parallel-size") or 1
    return -(-stages // on_each)


def _size(flags: Parsed, name: str) -> int:
    given = flags.flags.get(name)
    # What is no size is reported where the flag is taken over.
    return max(given.value, 1) if given and type(given.value) is int else 1


def nodes_of(
    commands: Sequence[ServeCommand], parsed: Sequence[Parsed], wishes: Wishes, count: int
) -> list[NodeDraft]:
    nodes = [node_of(text) for text in wishes.nodes] or [
        NodeDraft(f"node-{index + 1}") for index in range(count)
    ]
    addresses: dict[int, str] = {}
    for command, flags in zip(commands, parsed, strict=True):
        rank = _rank(flags)
        own = command.env.get("VLLM_HOST_IP")
        if own is not None and _is_address(own.text) and (rank is not None or len(commands) == 1):
            addresses[rank or 0] = own.text
    master = parsed[0].flags.get("master-addr")
    if master is not None and _is_address(str(master.value)):
        addresses.setdefault(0, str(master.value))
    for index, node in enumerate(nodes):
        if not node.address and not _is_address(node.host):
            node.address = addresses.get(index, "")
    return nodes


def node_of(text: str) -> NodeDraft:
    """The node of `HOST`, `USER@HOST` or `HOST=ADDRESS`.

    Raises:
        ConfigurationError: it is none of them.
    """
    host, _, address = text.partition("=")
    user, at, host = host.rpartition("@")
    if not host or (at and not user):
        raise ConfigurationError(
            f"--node {text}: must be HOST, USER@HOST or HOST=ADDRESS",
            hint="--node h100-a=10.0.0.1",
        )
    return NodeDraft(host, address, user)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def note_nodes(draft: Draft) -> None:
    """Addresses nobody gave get placeholders."""
    draft.comments["nodes",] = (
        "In pipeline order: the first has stage 0 and the API server, the last the last stage and "
        "the drafter."
    )
    for index, node in enumerate(draft.nodes):
        if node.address or _is_address(node.host):
            continue
        node.address = placeholder_address(index)
        draft.comments["nodes", index] = "SET THIS: the address on the network between the nodes"
        draft.note(
            "fill in",
            f"nodes[{index}].address",
            f"the address of {node.host} on the network between the nodes; {node.address} "
            f"holds its place (or give --node {node.host}=ADDRESS)",
        )


def count_gpus(draft: Draft, wishes: Wishes) -> None:
    """GPUs of each node, from the parallel sizes."""
    nodes, tensor, pipeline = len(draft.nodes), draft.tensor, draft.pipeline
    if draft.obstacles:
        return
    if pipeline == 1:
        draft.gpus = wishes.gpus or -(-tensor // nodes)
        if draft.gpus * nodes < tensor or draft.gpus * (nodes - 1) >= tensor:
            draft.cannot(
                f"tensor parallel {tensor} over {nodes} nodes of {draft.gpus} GPUs does not come "
                "out even",
                "give --gpus, or another number of nodes",
            )
        return
    draft.gpus = wishes.gpus or tensor * -(-pipeline // nodes)
    if nodes > pipeline:
        draft.cannot(
            f"{pipeline} pipeline stages of {tensor} GPUs on {nodes} nodes: a stage would span "
            "nodes, and its tensor parallelism the network between them",
            f"--tensor-parallel-size {tensor * pipeline // nodes or 1} "
            f"--pipeline-parallel-size {nodes}",
        )
    elif draft.gpus < tensor:
        draft.cannot(
            f"a stage needs {tensor} GPUs on one node; the nodes have {draft.gpus}",
            f"--tensor-parallel-size {draft.gpus} "
            f"--pipeline-parallel-size {tensor * pipeline // draft.gpus}",
        )
