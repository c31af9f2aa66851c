"""Commands imported without a network: the catalogue knows GLM-5.2, nothing else is looked up."""

from __future__ import annotations

from pathlib import Path

import pytest
from importing import Import, Imported

from mtppp.cluster import parse
from mtppp.importer.commands import find_commands
from mtppp.importer.judge import default_release, judge
from mtppp.importer.translate import translate
from mtppp.importer.wishes import Device, Wishes
from mtppp.model.config import find_config
from mtppp.model.facts import ModelFacts, read_facts


@pytest.fixture(scope="session")
def glm_5_2() -> ModelFacts:
    return read_facts(find_config("zai-org/GLM-5.2-FP8").values)


@pytest.fixture
def imported() -> Import:
    def run(
        *texts: str,
        nodes: tuple[str, ...] = (),
        facts: ModelFacts | None = None,
        gpu: str | None = None,
        given: dict[str, str] | None = None,
        base: Path = Path(),
        vllm: str | None = None,
        gpus: int | None = None,
        device: Device | None = None,
    ) -> Imported:
        commands = [command for text in texts for command in find_commands(text, "", given).serve]
        wishes = Wishes(nodes=nodes, vllm=vllm, gpus=gpus, gpu_type=gpu, device=device)
        draft = translate(commands, wishes, default_release=default_release(), base=base)
        judge(draft, facts, Path("cluster.yaml"))
        return Imported(draft, parse(draft.text(), Path("cluster.yaml")).cluster)

    return run
