"""Find the model's configuration and decide whether this deployment may be launched.

Before any host is touched where the configuration can be had on the operator's side; a model that
is a path on the nodes only is read there, with the other facts.
"""

from __future__ import annotations

from pathlib import Path

from mtppp.cluster import Model
from mtppp.cluster.placeholders import placeholders
from mtppp.console import Step
from mtppp.errors import ConfigurationError, MtpppError
from mtppp.hosts.facts import HostFacts
from mtppp.model.config import ModelConfig, find_config, parse_config, semantic_hash
from mtppp.model.facts import read_facts
from mtppp.phases.deployment import Deployment
from mtppp.phases.phase import WithoutTrace
from mtppp.plan.admission import refuse
from mtppp.plan.review import early_refusals


class FindModel(WithoutTrace):
    title = "model"

    def run(self, deployment: Deployment, step: Step) -> None:
        require_filled_in(deployment)
        read_model(deployment, step)
        if deployment.model is not None:
            refuse_early(deployment)


class ReadModel(WithoutTrace):
    """The same, refusing nothing yet."""

    title = "model"

    def run(self, deployment: Deployment, step: Step) -> None:
        read_model(deployment, step)


def require_filled_in(deployment: Deployment) -> None:
    """Pass only where no value is a placeholder.

    Raises:
        ConfigurationError: naming each.
    """
    if unset := placeholders(deployment.cluster):
        raise ConfigurationError(
            f"{deployment.file} is not filled in: {unset[0]}",
            details=unset[1:],
            hint="set it in the file; nothing was started",
        )


def read_model(deployment: Deployment, step: Step) -> None:
    """Find the configuration, unless only the nodes have it."""
    model = deployment.cluster.model
    try:
        config = _on_this_side(model)
    except MtpppError as error:
        if model.is_path or model.config is not None:
            raise
        deployment.not_here = error
        step.note = f"{model.id}: not to be had here, perhaps on the nodes"
        return
    if config is None:
        step.note = f"{deployment.cluster.model.id}: to be read on the nodes"
        return
    take(deployment, config)
    own = config.origin == f"file {model.id}/config.json"
    step.note = f"{model.id} ({'its config.json' if own else config.origin})"


def take(deployment: Deployment, config: ModelConfig) -> None:
    """Take this as the model's configuration."""
    deployment.config = config
    deployment.model = read_facts(config.values)


def refuse_early(deployment: Deployment) -> None:
    """Refuse what needs no host to be refused.

    Raises:
        Refused: with this model, the deployment is known to be wrong, or is not proven.
    """
    cluster, model = deployment.cluster, deployment.model
    assert model is not None
    with deployment.naming_lines():
        refusals = early_refusals(cluster, model)
    refuse(f"{model.model_type} on vLLM {cluster.runtime.vllm}", refusals)


def _on_this_side(model: Model) -> ModelConfig | None:
    if model.config is not None:
        return find_config(str(model.config))
    if not model.is_path:
        return find_config(model.id, revision=model.revision)
    here = Path(model.id).expanduser()
    try:
        return find_config(str(here)) if here.is_dir() else None
    except OSError:  # a directory of that name which is not for us to see says nothing
        return None


def on_nodes(model: Model, hosts: list[str], facts: list[HostFacts]) -> ModelConfig | None:
    """The configuration that a node has, None where none has; `compare_nodes` looks at all.

    Raises:
        ConfigurationError: it is no configuration.
    """
    having = ((h, f.model_config) for h, f in zip(hosts, facts, strict=True))
    host, text = next(((h, text) for h, text in having if text is not None), ("", None))
    if text is None:
        return None
    origin = f"{host}:{model.id}/config.json"
    return ModelConfig(parse_config(text, origin), origin, None)


def compare_nodes(config: ModelConfig, hosts: list[str], facts: list[HostFacts]) -> None:
    """Refuse nodes that hold another model than the one planned for.

    Raises:
        ConfigurationError: naming the nodes.
    """
    for host, fact in zip(hosts, facts, strict=True):
        if fact.model_config is None:
            continue
        held = parse_config(fact.model_config, f"{host}: config.json")
        if semantic_hash(held) != config.digest:
            raise ConfigurationError(
                f"{host} holds another model: its config.json differs from {config.origin}",
                hint="copy the same checkpoint to every node; of a hub's model, model.revision "
                "names one",
            )
