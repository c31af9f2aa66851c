"""cluster.yaml: what may stand in it, and how it is read."""

from mtppp.cluster.loading import Loaded, load, parse
from mtppp.cluster.schema import (
    Cluster,
    Model,
    Node,
    Parallel,
    Ray,
    Runtime,
    Serve,
    Speculative,
    Ssh,
)
from mtppp.cluster.source import KeyPath, Source

__all__ = [
    "Cluster",
    "KeyPath",
    "Loaded",
    "Model",
    "Node",
    "Parallel",
    "Ray",
    "Runtime",
    "Serve",
    "Source",
    "Speculative",
    "Ssh",
    "load",
    "parse",
]
