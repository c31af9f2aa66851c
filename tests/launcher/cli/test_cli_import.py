from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mtppp.cli.import_commands import command as import_
from mtppp.cli.plan import command as plan
from mtppp.cluster import load
from mtppp.errors import ConfigurationError, MtpppError, Refused
from mtppp.model.config import catalogue

RECIPE = Path(__file__).parents[2] / "data/glm-5.2-recipe.yaml"
GLM = "vllm serve zai-org/GLM-5.2-FP8 -tp 8 -pp 2 --nnodes 2 --kv-cache-dtype fp8"


@pytest.fixture(autouse=True)
def _without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", "/nonexistent")


def run(*arguments: str, status: int = 0) -> Result:
    result = CliRunner().invoke(
        import_, list(arguments), catch_exceptions=False, standalone_mode=False
    )
    assert (result.return_value or 0) == status
    return result


def failure(*arguments: str) -> MtpppError:
    with pytest.raises(MtpppError) as caught:
        run(*arguments)
    return caught.value


def test_the_file_on_stdout_loads_and_the_notes_are_on_stderr(tmp_path: Path) -> None:
    result = run(GLM, "--node", "h100-a", "--node", "h100-b=10.0.0.2", "--gpu", "H100-80GB")
    file = tmp_path / "cluster.yaml"
    file.write_text(result.stdout)
    cluster = load(file).cluster
    assert [node.host for node in cluster.nodes] == ["h100-a", "h100-b"]
    assert "changed:  layers 39/39: vLLM's own cut" in result.stderr
    assert "fill in:  nodes[0].address" in result.stderr


def test_the_public_recipe_is_imported_and_planned_and_nothing_is_in_the_way(
    tmp_path: Path,
) -> None:
    """One command, two scripts as people have them: what comes out is a launchable deployment."""
    recipe = (
        "vllm serve zai-org/GLM-5.2-FP8 --tensor-parallel-size 8 --pipeline-parallel-size 2 "
        "--nnodes 2 --node-rank {} --master-addr $HEAD_IP --kv-cache-dtype fp8 --tool-call-parser "
        "glm47 --enable-auto-tool-choice --reasoning-parser glm45 --speculative-config "
        """'{{"method":"mtp","num_speculative_tokens":5}}'{}\n"""
    )
    scripts = []
    for rank, more in ((0, ""), (1, " --headless")):
        scripts.append(tmp_path / f"node{rank}.sh")
        scripts[rank].write_text("export HEAD_IP=10.0.0.1\n" + recipe.format(rank, more))
    nodes = ("--node=h100-a", "--node=h100-b=10.0.0.2", "--gpu=H100-80GB", "--python=/opt/v/python")
    result = run(*map(str, scripts), *nodes)
    assert "fill in" not in result.stderr
    file = tmp_path / "cluster.yaml"
    file.write_text(result.stdout)
    planned = CliRunner().invoke(plan, [str(file), "--json"], catch_exceptions=False)
    assert planned.exit_code == 0
    report = json.loads(planned.stdout)
    assert report["refusals"] == []
    assert report["plan"]["layer_partition"] == [42, 36]
    assert report["plan"]["draft_tokens"] == 5
    assert report["memory"]["fits"]
    assert "stage_boundary" in report["plan"]["patches"]


def test_an_image_s_vllm_can_be_installed_by_mtppp(tmp_path: Path) -> None:
    command = "docker run --gpus all vllm/vllm-openai:v0.32.0 org/m -tp 8"
    assert "or import with --managed" in run(command).stderr
    result = run(command, "--managed", "--node=10.0.0.1")
    assert "and makes that" in result.stderr
    assert "fill in" not in result.stderr
    (tmp_path / "cluster.yaml").write_text(result.stdout)
    runtime = load(tmp_path / "cluster.yaml").cluster.runtime
    assert (runtime.environment, runtime.vllm) == ("managed", "0.32.0")


def test_files_with_one_command_per_node(tmp_path: Path) -> None:
    for rank, more in ((0, ""), (1, " --headless")):
        (tmp_path / f"node{rank}.sh").write_text(
            f"#!/bin/bash\nexport HEAD=10.0.0.1\nvllm serve org/m -tp 8 -pp 2 --nnodes 2 \\\n"
            f"  --node-rank {rank} --master-addr $HEAD{more}\n"
        )
    result = run(str(tmp_path / "node0.sh"), str(tmp_path / "node1.sh"))
    assert "address: 10.0.0.1" in result.stdout
    assert "node0.sh" in result.stdout.partition("name:")[0]
    assert "its config.json is not to be had here" in " ".join(result.stderr.split())


def test_standard_input() -> None:
    result = CliRunner().invoke(
        import_, ["-"], input="vllm serve org/m -tp 2\n", catch_exceptions=False
    )
    assert "tensor: 2" in result.stdout


def test_check_is_an_exit_status_only() -> None:
    assert run("vllm serve org/m -tp 2", "--check").output == ""
    report = json.loads(run(GLM, "--json").stdout)
    status = 0 if report["launchable"] else Refused.exit_status
    assert run(GLM, "--check", status=status).output == ""
    assert failure(GLM, "--check", "--gpu", "A100-80GB").exit_status == 4


def test_json() -> None:
    report = json.loads(run(GLM, "--json", "--gpu", "H100-80GB").stdout)
    assert report["cluster"]["parallel"]["pipeline"] == 2
    assert report["layer_partition"] in ([42, 36], [38, 40])
    assert {note["kind"] for note in report["notes"]} >= {"changed", "fill in", "moved"}
    assert report["file"].startswith("# Made by `mtppp import`")


def test_a_recipe() -> None:
    result = run(str(RECIPE), "--node", "a", "--node", "b", "--gpu", "H100-80GB")
    assert "id: zai-org/GLM-5.2-FP8" in result.stdout
    assert "pipeline: 2" in result.stdout
    assert "tokens: 5" in result.stdout
    other = run(
        str(RECIPE),
        *("--node", "a", "--node", "b", "--gpu", "H100-80GB"),
        *("--strategy", "multi_node_tp", "--speculation", "none"),
    )
    assert "tensor: 16" in other.stdout
    assert "speculative" not in other.stdout


def test_the_strategies_of_a_recipe() -> None:
    shown = run(str(RECIPE), "--strategies", "--gpu", "H200").stdout
    assert "multi_node_tp, speculation mtp" in shown
    assert "39/39 is illegal" in " ".join(shown.split())
    entries = json.loads(run(str(RECIPE), "--strategies", "--json").stdout)
    assert len(entries) == 21
    assert set(entries[0]) == {"strategy", "speculation", "command", "outcome", "reasons"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing.sh",), "nothing.sh: no such file"),
        (("echo hello",), "no command that serves a model"),
        (("vllm serve org/m", "--strategies"), "are for recipes"),
        (("vllm serve org/m", "--set", "X"), "--set X: must be NAME=VALUE"),
        ((str(RECIPE), "vllm serve org/m"), "a recipe is imported alone"),
        (("vllm serve org/m", "--node", "@b"), "must be HOST"),
    ],
)
def test_usage(arguments: tuple[str, ...], message: str) -> None:
    error = failure(*arguments)
    assert isinstance(error, ConfigurationError)
    assert message in error.message


def test_a_file_that_would_not_load_is_an_error() -> None:
    error = failure("vllm serve org/m --port 26310")
    assert "has 1 problem" in error.message
    assert "are Ray's" in error.details[0]


def test_the_catalogue_has_the_model_of_these_tests() -> None:
    assert "zai-org/GLM-5.2-FP8" in catalogue()


def test_a_flag_that_cannot_be_passed_on_is_named_as_the_command_has_it() -> None:
    error = failure("vllm serve org/m --no-such-flag 3")
    assert isinstance(error, ConfigurationError)
    assert error.message.startswith("--no-such-flag: no vLLM that mtppp knows has such a flag")
    assert "cluster.yaml" not in f"{error.message}{error.details}{error.hint}"


def test_an_empty_command() -> None:
    assert failure("").message == failure(" \n").message == "the command to import is empty"
