"""A cluster file in the making, and everything that was decided about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mtppp.cluster.source import KeyPath
from mtppp.cluster.writing import write_yaml
from mtppp.importer.wishes import Device

Kind = Literal["fill in", "changed", "needs", "refused", "warning", "kept", "moved"]
"""What a note says: a value to be filled in by hand; a value that is not what the command says;
something the deployment needs that plain vLLM lacks; that `mtppp launch` will refuse it, as things
are; something to know; a flag passed on unexamined; something mtppp does itself."""

KINDS: tuple[Kind, ...] = ("fill in", "refused", "changed", "needs", "warning", "kept", "moved")
"""In the order in which a person wants to read them."""


ReleaseFrom = Literal["wish", "image", "default"]
"""Who says which vLLM: the person who imports, a container image's tag, or nobody."""


@dataclass(frozen=True, slots=True)
class Note:
    """One decision.

    Attributes:
        about: a flag or variable as the command has it, or a key path of the file.
        message: what, and why.
    """

    kind: Kind
    about: str
    message: str


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why there can be no such deployment, and what can be instead."""

    reason: str
    way_out: str


@dataclass(slots=True)
class NodeDraft:
    """A node; `address` is "" where `host` is one."""

    host: str
    address: str = ""
    user: str = ""


@dataclass
class Draft:
    """What will be written.

    Attributes:
        python: "" for the default of a managed environment.
        comments: by key path of the file.
        obstacles: any one of them forbids the deployment.
    """

    name: str
    model: str
    nodes: list[NodeDraft]
    gpus: int
    vllm: str
    python: str
    gpu_type: str | None = None
    device: Device = "cuda"
    managed: bool = False
    ssh_config: Path | None = None
    release_from: ReleaseFrom = "default"
    tensor: int = 1
    pipeline: int = 1
    partition: tuple[int, ...] | None = None
    tokens: int = 0
    revision: str | None = None
    served_name: str | None = None
    port: int = 8000
    args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    secrets: list[str] = field(default_factory=list)
    header: str = ""
    comments: dict[KeyPath, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    obstacles: list[Obstacle] = field(default_factory=list)

    def note(self, kind: Kind, about: str, message: str) -> None:
        self.notes.append(Note(kind, about, message))

    def cannot(self, reason: str, way_out: str) -> None:
        self.obstacles.append(Obstacle(reason, way_out))

    def document(self) -> dict[str, Any]:
        """The values of the file, in its order; what is as by default is left out."""
        model: dict[str, Any] = {"id": self.model}
        if self.revision:
            model["revision"] = self.revision
        if self.served_name:
            model["served_name"] = self.served_name
        runtime: dict[str, Any] = {"vllm": self.vllm}
        if self.managed:
            runtime["environment"] = "managed"
        if self.python:
            runtime["python"] = self.python
        if self.device != "cuda":
            runtime["device"] = self.device
        if self.env:
            runtime["env"] = dict(sorted(self.env.items()))
        document: dict[str, Any] = {
            "name": self.name,
            "model": model,
            **({"ssh": {"config_file": str(self.ssh_config)}} if self.ssh_config else {}),
            "gpus_per_node": self.gpus,
            **({"gpu_type": self.gpu_type} if self.gpu_type else {}),
            "nodes": [_node(node) for node in self.nodes],
            "runtime": runtime,
            "parallel": {
                "tensor": self.tensor,
                "pipeline": self.pipeline,
                "layer_partition": list(self.partition) if self.partition else "auto",
            },
        }
        if self.tokens:
            document["speculative"] = {"method": "mtp", "tokens": self.tokens}
        document["serve"] = {"port": self.port} | ({"args": self.args} if self.args else {})
        if self.secrets:
            document["secrets"] = sorted(self.secrets)
        return document

    def text(self) -> str:
        """The file."""
        return write_yaml(self.document(), self.comments, self.header)

    def report(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "cluster": self.document(),
            "notes": [asdict(note) for note in self.sorted_notes()],
            "obstacles": [asdict(obstacle) for obstacle in self.obstacles],
        }

    def sorted_notes(self) -> Sequence[Note]:
        return sorted(self.notes, key=lambda note: KINDS.index(note.kind))


def _node(node: NodeDraft) -> dict[str, str]:
    values = {"host": node.host, "address": node.address, "user": node.user}
    return {key: value for key, value in values.items() if value}
