"""Find the model's configuration, decide whether this may be launched, and make the Plan."""

from __future__ import annotations

from mtppp.console import Step
from mtppp.phases.deployment import Deployment
from mtppp.phases.phase import WithoutTrace
from mtppp.plan.admission import admit
from mtppp.plan.build import build_plan


class MakePlan(WithoutTrace):
    title = "plan"

    def run(self, deployment: Deployment, step: Step) -> None:
        model = deployment.model_facts()
        admission = admit(deployment.cluster, model)
        plan = build_plan(
            deployment.cluster,
            model=model,
            admission=admission,
            bundle=deployment.plugins.name,
            facts=deployment.facts,
        )
        deployment.planned = plan
        step.note = (
            f"TP{plan.tensor} x PP{plan.pipeline},"
            f" layers {'/'.join(str(count) for count in plan.layer_partition)},"
            f" MTP k={plan.draft_tokens}; {admission.evidence}"
        )
