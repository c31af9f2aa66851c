"""Make the Plan."""

from __future__ import annotations

from mtppp.console import Step
from mtppp.errors import ConfigurationError
from mtppp.phases.deployment import Deployment
from mtppp.phases.find_model import compare_nodes, on_nodes, take
from mtppp.phases.phase import WithoutTrace
from mtppp.plan.admission import refuse
from mtppp.plan.partition import in_words
from mtppp.plan.review import Review, review


class MakePlan(WithoutTrace):
    """A Plan that nothing speaks against."""

    title = "plan"

    def run(self, deployment: Deployment, step: Step) -> None:
        reviewed = make_plan(deployment)
        refuse(reviewed.subject, reviewed.refusals)
        step.note = _summary(reviewed)


class ReviewPlan(WithoutTrace):
    """The same, refusing nothing: to look at."""

    title = "plan"

    def run(self, deployment: Deployment, step: Step) -> None:
        step.note = _summary(make_plan(deployment))


def make_plan(deployment: Deployment) -> Review:
    """Make the Plan from what is known of model and hosts."""
    cluster = deployment.cluster
    hosts = [node.host for node in deployment.nodes]
    if deployment.config is None:
        config = on_nodes(cluster.model, hosts, deployment.facts)
        if config is None:
            # A launch was told by the hosts' problems that a path is not there.
            raise deployment.not_here or ConfigurationError(
                f"{cluster.model.id}: no node has its config.json"
            )
        take(deployment, config)
    assert deployment.config is not None
    assert deployment.model is not None
    compare_nodes(deployment.config, hosts, deployment.facts)
    with deployment.naming_lines():
        deployment.reviewed = review(
            cluster,
            model=deployment.model,
            bundle=deployment.plugins.name,
            facts=deployment.facts,
        )
    return deployment.reviewed


def _summary(reviewed: Review) -> str:
    plan = reviewed.plan
    layers = in_words(plan.layer_partition)
    drafts = f"MTP k={plan.draft_tokens}" if plan.draft_tokens else "no speculation"
    warnings = len(reviewed.warnings)
    more = f"; {warnings} warning{'s' * (warnings > 1)}, see `mtppp plan`" if warnings else ""
    return f"TP{plan.tensor} x PP{plan.pipeline}, layers {layers}, {drafts}; {plan.evidence}{more}"
