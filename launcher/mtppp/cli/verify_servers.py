"""The servers that are verified, or verified by: named by their URL, or as a deployment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtppp.cli import verify_options as options
from mtppp.cli.deployments import connectable, resolve
from mtppp.errors import ConfigurationError, MtpppError
from mtppp.phases.deployment import Deployment
from mtppp.phases.gate import AT_OWN_RISK
from mtppp.phases.identity import identity
from mtppp.phases.status import DeploymentStatus, ask
from mtppp.phases.verify import candidate_of
from mtppp.verify.servers import Server

SERVER_KEY = "VLLM_API_KEY"


@contextmanager
def named(
    role: str, deployment: str | None, url: str, model: str
) -> Iterator[tuple[Server, dict[str, Any]]]:
    """A server, and what is known of it besides what it says; a deployment's can be reached inside.

    Args:
        deployment: file or name; without it and without `url`, that of ./cluster.yaml.
        model: the served name, by URL.

    Raises:
        ConfigurationError: both name one, or the deployment is not known.
        MtpppError: the deployment does not serve.
    """
    if url and deployment:
        raise ConfigurationError(
            f"{deployment} and --{role}-url both name the {role}", hint="give one of them"
        )
    if url:
        yield options.server(role, url, model), {}
        return
    target = connectable(resolve(deployment))
    # The only secret of its file that matters here.
    key = os.environ.get(SERVER_KEY) if SERVER_KEY in target.cluster.secrets else None
    target.secrets = {SERVER_KEY: key} if key else {}
    with closing(target):
        yield server_of(target, role)


def server_of(target: Deployment, role: str) -> tuple[Server, dict[str, Any]]:
    """The server of a deployment that runs, and what its ranks attest.

    Raises:
        MtpppError: it does not serve.
    """
    status = ask(target)
    if status.state not in ("serving", "gated"):
        problems = [f"{node.host}: {node.problem}" for node in status.nodes if node.problem]
        raise MtpppError(
            f"{status.name} is {status.state}: {status.explanation}",
            details=problems,
            hint=_way_out(status, target.file),
        )
    parallel, speculative = target.cluster.parallel, target.cluster.speculative
    about = {
        "launched": next((node.since for node in status.nodes if node.since), ""),
        "TP": parallel.tensor,
        "PP": parallel.pipeline,
        "drafts": speculative.tokens if speculative else 0,
        "evidence": status.evidence,
        "patches": " ".join(sorted({name for rank in status.ranks for name in rank["patches"]})),
    }
    about |= identity(target)
    if AT_OWN_RISK in status.gate_why:
        about["gate"] = f"open, {status.gate_why}"
    if status.at_own_risk:
        about["at own risk"] = " ".join(status.at_own_risk)
    return replace(candidate_of(target, status.endpoint), role=role), about


def _way_out(status: DeploymentStatus, file: Path) -> str:
    if status.state == "wrong":
        return (
            f"--candidate-url {status.endpoint} asks it all the same;"
            f" `mtppp launch --restart {file}` launches it anew"
        )
    if status.endpoint and status.state == "unknown":
        return "verify needs the key that it was launched with"
    if status.state == "unknown":
        return "see that its hosts can be reached, then verify again"
    if status.state in ("starting", "stopping") and any(node.doing for node in status.nodes):
        return "wait until that has ended, then verify again"
    return f"launch it first: mtppp launch {file}"
