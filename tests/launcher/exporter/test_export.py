from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from mtppp.cli.export import command as export
from mtppp.errors import ConfigurationError, Refused
from mtppp_patches.engine_spec import EngineSpec

MODEL = Path(__file__).parents[3] / "cluster_configs/models/demo-glm4-moe"
CLUSTER = """
name: demo
model: {{id: /data/demo, config: {model}}}
gpus_per_node: 2
nodes: [{nodes}]
runtime: {{vllm: "0.32.0", python: /opt/vllm/bin/python, env: {{NCCL_DEBUG: INFO}}}}
parallel: {{tensor: {tensor}, pipeline: {pipeline}}}
speculative: {{tokens: 3}}
serve: {{args: {{max-model-len: 1024}}}}
secrets: [HF_TOKEN]
"""
TWO = "{host: a, address: 10.0.0.1}, {host: b, address: 10.0.0.2}"


def exported(
    tmp_path: Path, *arguments: str, nodes: str = TWO, tensor: int = 2, pipeline: int = 2
) -> str:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER.format(model=MODEL, nodes=nodes, tensor=tensor, pipeline=pipeline))
    result = CliRunner().invoke(export, [str(file), *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def blocks(script: str) -> list[str]:
    """The shell of each node."""
    return script.split("\n# ---- ")[1:]


def environment_of(block: str) -> dict[str, str]:
    """Run a block up to the server, which is replaced by `env`."""
    body = block[block.index("\n(") : block.index("  exec ")].replace(
        'test -e "$PLUGINS/mtppp_patches"', "true"
    )
    ran = subprocess.run(
        ["bash", "-euc", f"ip() {{ echo '1: eth7 inet 10.0.0.2/24'; }}\n{body}\nenv\n)"],
        env={"PATH": "/usr/bin:/bin", "HF_TOKEN": "t"},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(line.partition("=")[::2] for line in ran.stdout.splitlines())


def test_one_block_per_node(tmp_path: Path) -> None:
    head, worker = blocks(exported(tmp_path))
    assert head.startswith("a (10.0.0.1)")
    assert worker.startswith("b (10.0.0.2)")
    for block in (head, worker):
        assert "exec /opt/vllm/bin/python -m vllm.entrypoints.cli.main serve /data/demo" in block
        assert "--distributed-executor-backend mp \\" in block
        assert "--async-scheduling" in block
        assert "--nnodes 2" in block
        assert "MASTER=10.0.0.1" in block
        assert "ray" not in block.lower().replace("demo-exported", "")
    assert "--headless" not in head
    assert "--headless" in worker


def test_the_environment_that_a_block_makes(tmp_path: Path) -> None:
    env = environment_of(blocks(exported(tmp_path, "--plugins-on-node", "/p q"))[1])
    assert env["VLLM_HOST_IP"] == "10.0.0.2"
    assert env["GLOO_SOCKET_IFNAME"] == "eth7"
    assert env["NCCL_SOCKET_IFNAME"] == "=eth7"
    assert env["PYTHONPATH"] == "/p q"
    assert env["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert env["NCCL_DEBUG"] == "INFO"
    assert env["MTPPP_RUN_DIR"].endswith("/demo-exported/1")
    spec = EngineSpec.from_json(env["MTPPP_ENGINE"])
    assert spec.placement is None
    assert "placement" not in spec.patches
    assert "engine_guard" in spec.patches
    assert spec.layer_partition is not None
    assert sum(spec.layer_partition) == 6
    assert env["VLLM_PP_LAYER_PARTITION"] == ",".join(map(str, spec.layer_partition))


def run_directory_made(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """The lines of a block that make its run directory, below `tmp_path`, for a careless umask."""
    block = blocks(exported(tmp_path))[0]
    lines = block[block.index("  OWN=") : block.index("  export PYTHONPATH=")]
    return subprocess.run(
        ["bash", "-c", f"umask 002; RANK=0\n{lines.replace('/var/tmp', str(tmp_path))}\necho made"],
        capture_output=True,
        text=True,
        check=False,
    )


def test_no_directory_of_a_block_can_be_changed_by_others(tmp_path: Path) -> None:
    assert run_directory_made(tmp_path).stdout == "made\n"
    own = tmp_path / f"mtppp-{_uid()}"
    for directory in (own, own / "demo-exported", own / "demo-exported/0"):
        assert directory.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_is_another_s_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"mtppp-{_uid()}").symlink_to(tmp_path / "elsewhere")
    made = run_directory_made(tmp_path)
    assert (made.returncode, made.stdout) == (1, "")
    assert "is not a directory of yours" in made.stderr


def test_nobody_makes_an_environment_without_mtppp(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    text = CLUSTER.format(model=MODEL, nodes=TWO, tensor=2, pipeline=2)
    file.write_text(text.replace("python: /opt/vllm/bin/python", "environment: managed"))
    with pytest.raises(ConfigurationError, match=r"runtime\.environment is managed"):
        CliRunner().invoke(export, [str(file)], catch_exceptions=False, standalone_mode=False)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    head = exported(tmp_path).partition("# ----")[0]
    for piece in ("nobody compares", "Nothing has asked whether the tokens", "--plugins DIR"):
        assert piece in " ".join(head.replace("#", "").split())


def test_a_secret_must_be_there_and_is_not_written(tmp_path: Path) -> None:
    body = blocks(exported(tmp_path))[0].partition("\n")[2]
    ran = subprocess.run(
        ["bash", "-c", body],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode != 0
    assert "export HF_TOKEN first" in ran.stderr


@pytest.mark.parametrize("form", ["shell", "slurm"])
def test_bash_reads_it(tmp_path: Path, form: str) -> None:
    script = exported(tmp_path, "--format", form)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_slurm(tmp_path: Path) -> None:
    script = exported(tmp_path, "--format", "slurm")
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=2" in script
    assert "RANK=$SLURM_NODEID" in script
    assert '--host "$ADDRESS"' in script
    assert "SLURM chooses and orders the nodes" in script
    assert "10.0.0.1" not in script


def test_slurm_s_script_gives_every_node_its_rank(tmp_path: Path) -> None:
    """With stand-ins for SLURM and the server: rank, address and headless of both nodes."""
    script = exported(tmp_path, "--format", "slurm", "--plugins-on-node", str(tmp_path / "p"))
    (tmp_path / "p/mtppp_patches").mkdir(parents=True)
    tools = tmp_path / "bin"
    tools.mkdir()
    stand_ins = {
        "scontrol": "echo n0; echo n1",
        "ip": "echo 1: ib0 inet 10.9.0.$((${SLURM_NODEID:-0} + 1))/24",
        # Every option of srun here has its value in the same word.
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\n'
        'if [ "$1" != bash ]; then exec "$@"; fi\n'
        'for n in 0 1; do SLURM_NODEID=$n "$@"; done',
        "server": 'echo "$VLLM_HOST_IP" "$@" | tr "\\n" " "; echo',
    }
    for name, body in stand_ins.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    ran = subprocess.run(
        ["bash", "-c", script.replace("/opt/vllm/bin/python", str(tools / "server"))],
        env={
            "PATH": f"{tools}:/usr/bin:/bin",
            "IFACE": "ib0",
            "HF_TOKEN": "t",
            "SLURM_JOB_NODELIST": "n[0-1]",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    head, worker = ran.stdout.splitlines()
    assert head.startswith("10.9.0.1 -m")
    assert "--node-rank 0 --master-addr 10.9.0.1" in head
    assert "--headless" not in head
    assert worker.startswith("10.9.0.2 -m")
    assert worker.rstrip().endswith("--node-rank 1 --master-addr 10.9.0.1 --headless")
    for rank in (0, 1):
        shutil.rmtree(f"/var/tmp/mtppp-{_uid()}/demo-exported/{rank}", ignore_errors=True)


def _uid() -> str:
    return subprocess.run(["id", "-u"], capture_output=True, text=True, check=True).stdout.strip()


def test_uneven_nodes_need_ray(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="the nodes have 2, 1 ranks"):
        exported(tmp_path, tensor=1, pipeline=3)


def test_what_is_refused_is_not_exported(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        CLUSTER.format(model=MODEL, nodes=TWO, tensor=2, pipeline=2).replace("0.32.0", "0.23.0")
    )
    with pytest.raises(Refused):
        CliRunner().invoke(export, [str(file)], catch_exceptions=False)


def test_one_node_needs_no_rendezvous(tmp_path: Path) -> None:
    (block,) = blocks(exported(tmp_path, nodes="{host: a, address: 10.0.0.1}", pipeline=1))
    assert "--nnodes" not in block
    assert "--master-addr" not in block


def test_the_plugins_directory(tmp_path: Path) -> None:
    directory = tmp_path / "plugins"
    exported(tmp_path, "--plugins", str(directory))
    assert (directory / "mtppp_patches/plugin.py").exists()
    assert list(directory.glob("*.dist-info/entry_points.txt"))
    with pytest.raises(ConfigurationError, match="is not empty"):
        exported(tmp_path, "--plugins", str(directory))
