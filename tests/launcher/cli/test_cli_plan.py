from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from click.testing import CliRunner, Result

from mtppp.cli.deployments import connectable, resolve
from mtppp.cli.plan import command
from mtppp.console import Console
from mtppp.errors import Refused
from mtppp.hosts.node import File
from mtppp.phases.make_plan import MakePlan
from mtppp.phases.phase import run_phases
from mtppp.phases.preview import AskHosts, AssumeHosts, ReadModel
from mtppp.phases.run_directory import PLAN_FILE
from mtppp.phases.stop import stop_node
from mtppp.runtime.lock import bundled_lock

MODEL = Path(__file__).resolve().parents[3] / "cluster_configs" / "models" / "demo-glm4-moe"

FILE: dict[str, Any] = {
    "name": "glm",
    "model": {"id": "zai-org/GLM-5.2-FP8"},
    "gpus_per_node": 8,
    "gpu_type": "H100-80GB",
    "nodes": [
        {"host": "h100-a", "address": "10.0.0.1"},
        {"host": "h100-b", "address": "10.0.0.2"},
    ],
    "runtime": {"vllm": "0.32.0", "python": "/opt/vllm/bin/python"},
    "parallel": {"tensor": 8, "pipeline": 2},
    "speculative": {"tokens": 3},
    "serve": {"args": {"max-model-len": 131072, "kv-cache-dtype": "fp8"}},
    # What is proven grows; these tests are about the rest.
    "at_own_risk": ["unlisted_family", "unproven_decode", "unproven_patch"],
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes FILE with `changes` in place of whole sections."""

    def written(**changes: Any) -> Path:
        path = tmp_path / "cluster.yaml"
        path.write_text(yaml.safe_dump(FILE | changes, sort_keys=False))
        return path

    return written


def plan(*arguments: object) -> Result:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_plan_says_where_everything_is_and_what_would_run(write: Callable[..., Path]) -> None:
    shown = plan(write())
    assert shown.exit_code == 0
    for line in (
        "  0  h100-a (10.0.0.1)  ranks 0-7  layers 0-41  API server",
        "  1  h100-b (10.0.0.2)  ranks 8-15  layers 42-77  drafter",
        "  VLLM_PP_LAYER_PARTITION=42,36",
        "    GLOO_SOCKET_IFNAME='<interface of 10.0.0.2>'",
        "  h100-a: server (log /var/tmp/mtppp-<uid>/glm/0/server.log)",
        "  26300-26399 on every node: Ray, between the nodes",
        "  http://10.0.0.1:8000: the API",
    ):
        assert line in shown.stdout.splitlines()
    flat = shown.stdout.replace(" \\\n    ", " ")
    assert "vllm.entrypoints.cli.main serve zai-org/GLM-5.2-FP8 --served-model-name" in flat
    assert "-m ray.scripts.scripts start --address=10.0.0.1:26300" in flat


def test_it_is_readable_without_colour_and_within_80_columns(write: Callable[..., Path]) -> None:
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    shown = subprocess.run(
        [sys.executable, "-m", "mtppp", "plan", str(write(gpu_type="A100-80GB"))],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert shown.returncode == 4
    assert "\x1b" not in shown.stdout
    lines = shown.stdout.splitlines()
    # A variable is left whole, to be copied.
    long = [line for line in lines if len(line) > 80 and not re.match(r" +[A-Z_a-z]+=", line)]
    assert long == []
    assert all(line == line.rstrip() for line in lines)
    assert any(line.startswith("refused: ") for line in lines)


def test_a_managed_environment_is_where_its_lock_says(write: Callable[..., Path]) -> None:
    shown = plan(write(runtime={"vllm": "0.32.0", "environment": "managed"}), "--json")
    assert shown.exit_code == 0
    python = json.loads(shown.stdout)["plan"]["server"]["argv"][0]
    assert python == f"/var/tmp/mtppp-<uid>/envs/{bundled_lock('0.32.0', 'cuda').digest}/bin/python"


def test_a_refused_plan_is_shown_with_its_refusal(write: Callable[..., Path]) -> None:
    file = write(parallel={"tensor": 8, "pipeline": 2, "layer_partition": [39, 39]})
    shown = plan(file)
    assert shown.exit_code == 4
    assert "layers 39-77" in shown.stdout
    assert "way out: use 38/40 or 42/36, or auto" in shown.stdout
    data = json.loads(plan(file, "--json").stdout)
    assert "illegal-cut" in [refusal["code"] for refusal in data["refusals"]]
    assert data["plan"]["layer_partition"] == [39, 39]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parallel": {"tensor": 6, "pipeline": 2}}, "64 attention heads do not divide"),
        ({"gpu_type": "A100-80GB"}, "the model attends sparsely"),
        ({"serve": {}}, "max-model-len 1048576 fits under no cut"),
        (
            {"parallel": {"tensor": 8, "pipeline": 2, "layer_partition": [39, 39]}},
            "inside layers 38 to 41",
        ),
    ],
)
def test_a_launch_refuses_what_the_plan_refuses(
    write: Callable[..., Path], changes: dict[str, Any], reason: str
) -> None:
    deployment = connectable(resolve(str(write(**changes))))
    with pytest.raises(Refused, match=reason):
        run_phases([ReadModel(), AssumeHosts(), MakePlan()], deployment, Console())
    assert plan(write(**changes)).exit_code == 4


def test_the_same_input_gives_the_same_bytes_and_no_secret_is_in_them(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    file = write(secrets=["HF_TOKEN"])
    outputs = []
    for seed in ("1", "2"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "HF_TOKEN": f"hf_nobodys{seed}",
            "TZ": f"Etc/GMT+{seed}",
        }
        page = tmp_path / f"{seed}.html"
        shown = subprocess.run(
            [sys.executable, "-m", "mtppp", "plan", str(file), "--json", "--html", str(page)],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        outputs.append(shown.stdout + page.read_text())
    assert outputs[0] == outputs[1]
    assert "nobodys" not in outputs[0]
    assert "HF_TOKEN" in outputs[0]


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [f"{name}={value}" for name, value in attrs if name in {"src", "href"}]


def test_the_page_escapes_everything_and_takes_nothing_from_elsewhere(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    runtime = {**FILE["runtime"], "env": {"NCCL_DEBUG_FILE": "</pre><script>alert(1)</script>&"}}
    target = tmp_path / "plan.html"
    assert plan(write(runtime=runtime), "--html", target).exit_code == 0
    text = target.read_text()
    page = _Page()
    page.feed(text)
    assert page.outside == []
    assert "script" not in page.tags
    assert not re.search(r"url\(|@import|javascript:", text)
    assert page.tags.count("svg") == 4
    # 78 layers and the drafter; one background a stage; four parts of memory a stage.
    assert page.tags.count("rect") == 79 + 2 + 2 * 4
    assert "&lt;script&gt;alert(1)" in text
    assert "prefers-color-scheme: dark" in text
    for section in ("Set where the file says nothing", "Left alone", "Time"):
        assert f"<h2>{section}</h2>" in text


def test_a_page_that_cannot_be_written_is_said(write: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(Exception, match="cannot be written: No such file or directory"):
        plan(write(), "--html", tmp_path / "none" / "plan.html")


def test_a_model_that_only_the_nodes_have_needs_them(write: Callable[..., Path]) -> None:
    with pytest.raises(Exception, match="is on the nodes only"):
        plan(write(model={"id": "/models/elsewhere"}))


@pytest.fixture
def local(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a cluster of two nodes on this machine, under a name of its own."""
    name = f"test-{uuid4().hex[:8]}"

    def written(**changes: Any) -> Path:
        base: dict[str, Any] = {
            "name": name,
            "model": {"id": str(MODEL)},
            "gpus_per_node": 1,
            "gpu_type": None,
            "nodes": [
                {"host": f"local-{i}", "address": f"127.0.1.{i}", "transport": "local"}
                for i in (1, 2)
            ],
            "runtime": {"vllm": "0.32.0", "python": sys.executable, "device": "cpu"},
            "parallel": {"pipeline": 2},
            "serve": {"args": {"max-model-len": 512}},
            "at_own_risk": [],
        }
        return write(**(base | changes))

    return written


def test_connecting_uses_the_hosts_facts_and_changes_nothing(local: Callable[..., Path]) -> None:
    file = local()
    shown = plan(file, "--connect", "--json")
    data = json.loads(shown.stdout)
    assert shown.exit_code == 1
    assert any("has no vLLM" in problem for problem in data["host_problems"])
    assert data["refusals"] == []
    assert data["plan"]["nodes"][0]["ray"]["env"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert f"mtppp-{os.getuid()}/" in data["plan"]["nodes"][1]["directory"]
    assert not Path(data["plan"]["nodes"][0]["directory"]).exists()
    assert "<" not in json.dumps(data["plan"])


def test_nothing_runs_is_a_difference(local: Callable[..., Path]) -> None:
    shown = plan(local(), "--diff")
    assert (shown.exit_code, shown.stdout) == (
        1,
        "nothing of this deployment runs: a launch would start all of it\n",
    )


@pytest.fixture
def running(local: Callable[..., Path]) -> Iterator[Path]:
    """A process on each node that bears the deployment's mark, beside its Plan."""
    file = local()
    deployment = connectable(resolve(str(file)))
    run_phases([ReadModel(), AskHosts(), MakePlan()], deployment, Console())
    try:
        for node, planned in deployment.members:
            text = deployment.plan.to_json()
            node.write(planned.directory, [File(PLAN_FILE, text.encode())])
            node.start(
                role="ray",
                argv=["sleep", "60"],
                env={"MTPPP_RUN_DIR": planned.directory},
                directory=planned.directory,
                log="ray.log",
            )
        yield file
    finally:
        for node, planned in deployment.members:
            stop_node(node, planned)
        shutil.rmtree(Path(deployment.plan.head.directory).parent)


@pytest.mark.slow
def test_what_runs_is_compared_in_words(running: Path, local: Callable[..., Path]) -> None:
    same = plan(running, "--diff")
    assert (same.exit_code, same.stdout) == (0, "what runs is as planned\n")
    local(serve={"args": {"max-model-len": 1024}})
    other = plan(running, "--diff", "--json")
    assert other.exit_code == 1
    assert json.loads(other.stdout) == {
        "runs": True,
        "same": False,
        "differences": [
            {"what": "vllm serve --max-model-len", "running": "512", "planned": "1024"}
        ],
    }
