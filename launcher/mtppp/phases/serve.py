"""Start the server on the first node and wait until it is ready, or dead."""

from __future__ import annotations

import time

from mtppp.console import Step
from mtppp.engine.client import EngineClient
from mtppp.errors import HostTimeout, RemoteCommandFailed
from mtppp.phases.deployment import Deployment
from mtppp.phases.logs import telling_lines
from mtppp.phases.phase import WithoutTrace

_POLL = 1.0  # seconds between two looks at a loading server
_LOOK_AT_PROCESS = 5.0  # seconds between two questions over ssh


class StartServer(WithoutTrace):
    """`vllm serve`. Its end is that of its node: see StartRay.clean_up."""

    title = "server"

    def run(self, deployment: Deployment, step: Step) -> None:
        node, planned = deployment.head
        command = deployment.plan.server
        node.start(
            role=command.role,
            argv=command.argv,
            env=deployment.environment(command),
            directory=planned.directory,
            log=command.log,
        )
        step.note = f"log {node.host}:{planned.directory}/{command.log}"


class WaitUntilReady(WithoutTrace):
    """Until /health says so; a server that died is noticed within seconds."""

    title = "ready"

    def run(self, deployment: Deployment, step: Step) -> None:
        timeout = deployment.cluster.serve.ready_timeout
        client = EngineClient(deployment.plan.endpoint)
        started = time.monotonic()
        looked = started
        while not client.healthy():
            now = time.monotonic()
            if now - looked >= _LOOK_AT_PROCESS:
                looked = now
                _check_alive(deployment)
            if now - started > timeout:
                raise HostTimeout(
                    deployment.head[0].host,
                    f"the server was not ready in {timeout} s",
                    hint="raise serve.ready_timeout if it was still loading",
                    details=_server_log(deployment),
                )
            time.sleep(_POLL)
        client.close()
        step.note = deployment.plan.endpoint


def _check_alive(deployment: Deployment) -> None:
    for node, planned in deployment.members:
        for entry in node.processes(planned.directory)["recorded"]:
            if entry["alive"]:
                continue
            what = "vLLM's server" if entry["role"] == "server" else "Ray"
            raise RemoteCommandFailed(
                node.host,
                f"{what} ended while the deployment was starting",
                hint=f"the whole log is {entry['log']} on {node.host}",
                details=_server_log(deployment),
            )


def _server_log(deployment: Deployment) -> list[str]:
    node, planned = deployment.head
    logs = node.read(f"{planned.directory}/{deployment.plan.server.log}")
    return [line for text in logs.values() for line in telling_lines(text, 12)]
