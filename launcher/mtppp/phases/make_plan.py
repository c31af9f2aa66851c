"""Make the Plan."""

from __future__ import annotations

from mtppp.console import Step
from mtppp.phases.deployment import Deployment
from mtppp.phases.find_model import compare_nodes, on_nodes, settle
from mtppp.phases.phase import WithoutTrace
from mtppp.plan.build import build_plan


class MakePlan(WithoutTrace):
    title = "plan"

    def run(self, deployment: Deployment, step: Step) -> None:
        cluster = deployment.cluster
        hosts = [node.host for node in deployment.nodes]
        if deployment.config is None:
            settle(deployment, on_nodes(cluster.model, hosts, deployment.facts))
        assert deployment.config is not None
        assert deployment.model is not None
        assert deployment.admission is not None
        compare_nodes(deployment.config, hosts, deployment.facts)
        plan = build_plan(
            cluster,
            model=deployment.model,
            admission=deployment.admission,
            bundle=deployment.plugins.name,
            facts=deployment.facts,
        )
        deployment.planned = plan
        layers = "/".join(str(count) for count in plan.layer_partition)
        step.note = (
            f"TP{plan.tensor} x PP{plan.pipeline}, layers {layers}, "
            f"{f'MTP k={plan.draft_tokens}' if plan.draft_tokens else 'no speculation'}; "
            f"{plan.evidence}"
        )
