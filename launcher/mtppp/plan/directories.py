"""Where a deployment lives on a node.

Below /var/tmp and not in a home directory: those may be on a file system that all nodes share.
"""

from __future__ import annotations

import hashlib


def root(uid: int | str) -> str:
    """All that mtppp keeps on a node for one user."""
    return f"/var/tmp/mtppp-{uid}"  # noqa: S108 - private: made with mode 700, its owner checked


def run_directory(uid: int | str, deployment: str, node: int) -> str:
    """The run directory; the node's index keeps two nodes on one machine apart."""
    return f"{root(uid)}/{deployment}/{node}"


def ray_directory(uid: int | str, deployment: str, node: int) -> str:
    """Ray's temp-dir, at most 43 characters long for any name.

    Ray puts Unix sockets below it at `session_<date>_<pid>/sockets/plasma_store`, 64 characters,
    and the kernel ends their paths at 107 bytes.
    """
    digest = hashlib.sha256(f"{deployment}/{node}".encode()).hexdigest()
    return f"{root(uid)}/r/{digest[:8]}"


def environments(uid: int | str) -> str:
    """The environments that mtppp made, for all deployments of a user."""
    return f"{root(uid)}/envs"


def environment(uid: int | str, lock: str) -> str:
    """One of them, named by the digest of its lock."""
    return f"{environments(uid)}/{lock}"


def plugins_directory(uid: int | str, bundle: str) -> str:
    """The plugins' directory; its name is the hash of its contents, so it is never changed."""
    return f"{root(uid)}/plugins/{bundle}"
