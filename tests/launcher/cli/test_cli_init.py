from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mtppp.cli.init import command as init
from mtppp.cluster import Cluster, load
from mtppp.cluster.schema import MANAGED_WITH
from mtppp.errors import ConfigurationError, Refused

NODES = ("--node", "a=10.0.0.1", "--node", "b=10.0.0.2")


@pytest.fixture(autouse=True)
def _without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", "/nonexistent")


def run(file: Path, *arguments: str, answers: str = "") -> tuple[Cluster, Result]:
    result = CliRunner().invoke(
        init, [str(file), *arguments], input=answers, catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return load(file).cluster, result


def test_answers_make_a_file(tmp_path: Path) -> None:
    answers = (
        "zai-org/GLM-5.2-FP8\nh100-a=10.0.0.1\nroot@h100-b=10.0.0.2\n\nubuntu\n\n~/v/bin/python\n"
    )
    cluster, result = run(tmp_path / "cluster.yaml", answers=answers)
    assert cluster.name == "glm-5.2-fp8"
    assert [(n.host, n.address, n.user, n.gpus) for n in cluster.nodes] == [
        ("h100-a", "10.0.0.1", "ubuntu", 8),
        ("h100-b", "10.0.0.2", "root", 8),
    ]
    assert cluster.runtime.python == "~/v/bin/python"
    assert (cluster.parallel.tensor, cluster.parallel.pipeline) == (8, 2)
    assert cluster.speculative is not None
    assert cluster.speculative.tokens == 3
    assert result.stdout == ""


def test_who_has_no_vllm_has_it_installed(tmp_path: Path) -> None:
    answers = "org/m\na=10.0.0.1\n\n\n\n\n"
    cluster, _ = run(tmp_path / "cluster.yaml", answers=answers)
    assert (cluster.runtime.environment, cluster.runtime.python) == ("managed", MANAGED_WITH)
    given = ("--yes", "--managed", "--python", "/usr/bin/python3.12", "--model", "org/m")
    cluster, _ = run(tmp_path / "other.yaml", *given, *NODES)
    assert (cluster.runtime.environment, cluster.runtime.python) == (
        "managed",
        "/usr/bin/python3.12",
    )


def test_options_ask_nothing(tmp_path: Path) -> None:
    cluster, result = run(
        tmp_path / "c.yaml",
        *("--yes", "--model", "/data/m", "--gpus", "4", "--user", "me", "--vllm", "0.31.0"),
        *NODES,
    )
    assert cluster.model.id == "/data/m"
    assert cluster.runtime.vllm == "0.31.0"
    assert cluster.parallel.tensor == 4
    assert cluster.nodes[1].user == "me"
    assert "written without knowing the model" in result.stderr


def test_memory_is_looked_at_where_the_gpus_are_known(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    glm = ("--yes", "--model", "zai-org/GLM-5.2-FP8")
    cluster, _ = run(file, *glm, *NODES, "--gpu", "H100-80GB")
    assert isinstance(cluster.serve.args["max-model-len"], int)
    with pytest.raises(Refused, match="does not fit"):
        run(tmp_path / "d.yaml", *glm, "--node", "a=10.0.0.1", "--gpu", "H100-80GB")
    assert not (tmp_path / "d.yaml").exists()


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("mine")
    with pytest.raises(ConfigurationError, match="exists"):
        run(file, "--yes", "--model", "org/m", *NODES)
    assert file.read_text() == "mine"


def test_yes_needs_model_and_nodes(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--model and --node are needed"):
        run(tmp_path / "c.yaml", "--yes", "--model", "org/m")


def test_what_was_guessed_is_marked_and_the_next_command_named(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    cluster, result = run(
        file, "--yes", "--model", "/models/none", "--node", "a", "--node", "b=10.0.0.2"
    )
    assert [node.address for node in cluster.nodes] == ["192.0.2.1", "10.0.0.2"]
    assert file.read_text().count("SET THIS") == 3
    for key in ("nodes[0].address", "gpus_per_node", "runtime.python"):
        assert f"fill in: {key}: " in result.stderr
    assert result.stderr.count("/models/none is not on this machine") == 1
    assert "--connect" in result.stderr
    assert "hub id" not in result.stderr
    assert result.stderr.endswith(f"then: mtppp plan --connect {file}\n")


def test_nobody_answers(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="standard input ended") as raised:
        run(tmp_path / "c.yaml", answers="org/m\n")
    assert raised.value.hint == "give --model, --node for each node, and --yes"
    assert not (tmp_path / "c.yaml").exists()
