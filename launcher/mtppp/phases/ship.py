"""Put on every node what its processes will need: plugins, Ray's token, vLLM's private settings."""

from __future__ import annotations

import json
import secrets
from datetime import UTC, datetime

from mtppp import state
from mtppp.console import Step
from mtppp.errors import RemoteCommandFailed
from mtppp.hosts.lock import operator
from mtppp.hosts.node import File, Node
from mtppp.phases.deployment import Deployment
from mtppp.phases.phase import Starts, look_at_each, on_each
from mtppp.phases.run_directory import CLUSTER_FILE, LAUNCH_FILE, PLAN_FILE
from mtppp.phases.stop import stop_node
from mtppp.plan import environment
from mtppp.plan.plan import NodePlan
from mtppp_patches.gate import KEY_FILE


class ShipPlugins(Starts):
    title = "plugins"

    def run(self, deployment: Deployment, step: Step) -> None:
        token = _token_of(deployment) if deployment.living else secrets.token_hex(32)
        deployment.gate_key = secrets.token_hex(32) if deployment.plan.gate else ""
        state.remember(deployment.cluster, deployment.file)
        server_log = deployment.plan.server.log

        def ship(member: tuple[Node, NodePlan]) -> None:
            node, planned = member
            key = _gate_key(deployment) if planned.index == 0 else []
            if planned.index in deployment.living:
                node.set_aside(planned.directory, planned.ray_directory, [server_log])
                noted = node.look(deployment.cluster.name, planned.index)["launch"] or {}
                launched = _launched_by(noted.get("gpu_memory"))
                node.write(planned.directory, [launched, *key])
                return
            # What a crash left: records of processes that ended, attestations, shared memory.
            stop_node(node, planned)
            node.set_aside(planned.directory, planned.ray_directory, [server_log, planned.ray.log])
            _ship_plugins(deployment, node, planned)
            used = node.gpu_memory()["used"] if deployment.plan.device == "cuda" else None
            node.write(planned.directory, [*_files(deployment, token), _launched_by(used), *key])

        on_each(deployment.members, ship)
        step.note = f"{deployment.plugins.name}, patches: {', '.join(deployment.plan.patches)}"

    def clean_up(self, deployment: Deployment) -> None:
        """The token goes; the plugins may stay: their name says what they are."""
        on_each(deployment.members, lambda member: stop_node(*member))
        state.forget(deployment.cluster.name)


def _ship_plugins(deployment: Deployment, node: Node, planned: NodePlan) -> None:
    # The directory is named by its contents; METADATA is written last and says it is whole.
    files = deployment.plugins.files
    last = next(path for path in files if path.endswith(".dist-info/METADATA"))
    if node.exists(f"{planned.plugins}/{last}"):
        return
    ordered = sorted(files, key=lambda path: (path == last, path))
    node.write(planned.plugins, [File(path, files[path], 0o644) for path in ordered])


def _gate_key(deployment: Deployment) -> list[File]:
    """What lets our own requests through the server's gate; a new one for each server."""
    return [File(KEY_FILE, deployment.gate_key.encode())] if deployment.plan.gate else []


def _token_of(deployment: Deployment) -> str:
    """The token of the Ray that lives on, which starts on the first node.

    Raises:
        RemoteCommandFailed: that node has lost it.
    """
    tokens: list[str] = []

    def read(member: tuple[Node, NodePlan]) -> None:
        node, planned = member
        tokens.extend(node.read(f"{planned.directory}/{environment.TOKEN_FILE}").values())

    look_at_each([deployment.head], read)
    if not tokens:
        raise RemoteCommandFailed(
            deployment.head[0].host,
            "the token of the Ray that runs is not in the run directory any more",
            hint="launch with --restart: Ray is started anew, too",
        )
    return tokens[0]


def _launched_by(gpu_memory: list[int] | None) -> File:
    record = {
        "by": operator(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu_memory": gpu_memory,
    }
    return File(LAUNCH_FILE, json.dumps(record).encode())


def _files(deployment: Deployment, token: str) -> list[File]:
    not_carried_over = json.dumps(sorted({*environment.NOT_CARRIED_OVER, *deployment.plan.secrets}))
    return [
        File(PLAN_FILE, deployment.plan.to_json().encode()),
        File(CLUSTER_FILE, state.record(deployment.cluster, deployment.file).encode()),
        File(environment.TOKEN_FILE, token.encode()),
        File(
            f"{environment.CONFIG_ROOT}/ray_non_carry_over_env_vars.json",
            not_carried_over.encode(),
        ),
    ]
