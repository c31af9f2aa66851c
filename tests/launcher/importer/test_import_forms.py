"""The forms that people's commands have, each with the cluster it must become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from importing import Import

from mtppp.cluster import Cluster
from mtppp.errors import ConfigurationError, MtpppError, Refused
from mtppp.importer.judge import default_release

MTP = """'{"method": "mtp", "num_speculative_tokens": 3}'"""


def at(cluster: Cluster, path: str) -> Any:
    """The value at "serve.args.dtype"; a last key that is absent is None."""
    value: Any = cluster
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else getattr(value, key)
    return value


# name, command, what the loaded cluster must hold
FORMS: list[tuple[str, str, dict[str, Any]]] = [
    (
        "plain",
        "vllm serve org/model --tensor-parallel-size 8 --max-model-len 4096",
        {
            "model.id": "org/model",
            "name": "model",
            "parallel.tensor": 8,
            "parallel.pipeline": 1,
            "gpus_per_node": 8,
            "serve.args.max-model-len": 4096,
            "speculative": None,
        },
    ),
    ("equals", "vllm serve org/model --tensor-parallel-size=4", {"parallel.tensor": 4}),
    (
        "short forms",
        "vllm serve org/model -tp 4 -pp 2 -n 2 -r 0",
        {"parallel.tensor": 4, "parallel.pipeline": 2, "gpus_per_node": 4},
    ),
    ("short forms with equals", "vllm serve org/model -tp=2", {"parallel.tensor": 2}),
    ("short form at once", "vllm serve org/model -n2 -tp 2 -pp 2", {"gpus_per_node": 2}),
    (
        "underscores",
        "vllm serve org/model --tensor_parallel_size 2 --max_model_len=1024",
        {"parallel.tensor": 2, "serve.args.max-model-len": 1024},
    ),
    (
        "abbreviations",
        "vllm serve org/model --tensor 2 --max-num-se 16 --gpu-mem 0.8",
        {
            "parallel.tensor": 2,
            "serve.args.max-num-seqs": 16,
            "serve.args.gpu-memory-utilization": 0.8,
        },
    ),
    (
        "JSON with spaces",
        f"vllm serve org/model --speculative-config {MTP}",
        {"speculative.tokens": 3, "speculative.method": "mtp"},
    ),
    (
        "JSON in double quotes",
        r'vllm serve org/model --speculative-config "{\"method\":\"mtp\",'
        r'\"num_speculative_tokens\":2}"',
        {"speculative.tokens": 2},
    ),
    (
        "JSON after equals",
        """vllm serve org/m --speculative-config='{"method":"mtp","num_speculative_tokens":1}'""",
        {"speculative.tokens": 1},
    ),
    (
        "short speculative-config",
        f"vllm serve org/model -sc {MTP}",
        {"speculative.tokens": 3},
    ),
    (
        "dotted keys",
        "vllm serve org/model --speculative-config.method mtp "
        "--speculative-config.num_speculative_tokens 5",
        {"speculative.tokens": 5},
    ),
    (
        "dotted keys with underscores in the flag",
        "vllm serve org/model --speculative_config.method=mtp "
        "--speculative_config.num_speculative_tokens=4",
        {"speculative.tokens": 4},
    ),
    (
        "separate speculative flags",
        "vllm serve org/model --spec-method mtp --spec-tokens 3",
        {"speculative.tokens": 3},
    ),
    (
        "MTP's former names",
        "vllm serve org/model "
        """--speculative-config '{"method":"deepseek_mtp","num_speculative_tokens":1}'""",
        {"speculative.method": "mtp"},
    ),
    (
        "dotted compilation config",
        "vllm serve org/model -cc.pass_config.fuse_allreduce_rms=False -cc.level 3",
        {
            "serve.args.compilation-config": {
                "pass_config": {"fuse_allreduce_rms": False},
                "level": 3,
            }
        },
    ),
    ("optimisation level", "vllm serve org/model -O3", {"serve.args.optimization-level": "3"}),
    (
        "optimisation level apart",
        "vllm serve org/model -O 2",
        {"serve.args.optimization-level": "2"},
    ),
    (
        "switches on and off",
        "vllm serve org/model --enable-prefix-caching --no-enable-chunked-prefill "
        "--trust-remote-code",
        {
            "serve.args.enable-prefix-caching": True,
            "serve.args.enable-chunked-prefill": False,
            "serve.args.trust-remote-code": True,
        },
    ),
    (
        "sizes",
        "vllm serve org/model --max-model-len 128k --max-num-batched-tokens 8K",
        {"serve.args.max-model-len": 128000, "serve.args.max-num-batched-tokens": 8192},
    ),
    (
        "several values",
        "vllm serve org/model --cudagraph-capture-sizes 1 2 4 --dtype bfloat16",
        {"serve.args.cudagraph-capture-sizes": [1, 2, 4], "serve.args.dtype": "bfloat16"},
    ),
    (
        "continued lines and comments",
        "# the model\nvllm serve org/m \\\n  --tensor-parallel-size 2 \\\n  --port 9000  # ours\n",
        {"parallel.tensor": 2, "serve.port": 9000},
    ),
    (
        "continued lines with blanks behind the backslash, from Windows",
        "vllm serve org/model \\  \r\n  --tensor-parallel-size 2\r\n",
        {"parallel.tensor": 2},
    ),
    (
        "variables",
        'MODEL=org/model\nexport TP=4\nvllm serve "$MODEL" --tensor-parallel-size ${TP}',
        {"model.id": "org/model", "parallel.tensor": 4},
    ),
    (
        "variables with defaults",
        "vllm serve ${MODEL:-org/model} --tensor-parallel-size ${TP:=2}",
        {"model.id": "org/model", "parallel.tensor": 2},
    ),
    (
        "a variable that holds flags",
        'ARGS="--tensor-parallel-size 2 --dtype half"\nvllm serve org/model $ARGS',
        {"parallel.tensor": 2, "serve.args.dtype": "half"},
    ),
    (
        "an array",
        "ARGS=(\n  --tensor-parallel-size 2  # two\n  --chat-template 'a b.jinja'\n)\n"
        'ARGS+=(--dtype half)\nvllm serve org/model "${ARGS[@]}" "$@"',
        {
            "parallel.tensor": 2,
            "serve.args.chat-template": "a b.jinja",
            "serve.args.dtype": "half",
        },
    ),
    (
        "environment before the command",
        "NCCL_DEBUG=INFO VLLM_LOGGING_LEVEL=DEBUG vllm serve org/model",
        {"runtime.env": {"NCCL_DEBUG": "INFO", "VLLM_LOGGING_LEVEL": "DEBUG"}},
    ),
    (
        "exported environment, without the script's own variables",
        "export NCCL_DEBUG=INFO HEAD_IP=10.0.0.1\nvllm serve org/model --master-addr $HEAD_IP",
        {"runtime.env": {"NCCL_DEBUG": "INFO"}},
    ),
    (
        "env and nohup, output redirected, in the background",
        "nohup env OMP_NUM_THREADS=4 vllm serve org/model -tp 2 > log.txt 2>&1 &",
        {"runtime.env": {"OMP_NUM_THREADS": "4"}, "parallel.tensor": 2, "serve.args": {}},
    ),
    (
        "a pipe behind",
        "vllm serve org/model -tp 2 2>&1 | tee serve.log",
        {"parallel.tensor": 2, "serve.args": {}},
    ),
    (
        "the API server's module",
        "python -m vllm.entrypoints.openai.api_server --model org/model --tensor-parallel-size 2",
        {"model.id": "org/model", "parallel.tensor": 2},
    ),
    (
        "the command's module, with its python",
        "~/venv/bin/python3 -m vllm.entrypoints.cli.main serve org/model",
        {"model.id": "org/model", "runtime.python": "~/venv/bin/python3"},
    ),
    (
        "the script of an environment",
        "/opt/v/bin/vllm serve org/model",
        {"runtime.python": "/opt/v/bin/python"},
    ),
    (
        "an environment that is activated",
        "source $HOME/vllm/bin/activate && vllm serve org/model",
        {"runtime.python": "~/vllm/bin/python"},
    ),
    (
        "the model as a flag",
        "vllm serve --model org/model --tensor-parallel-size 2",
        {"model.id": "org/model"},
    ),
    (
        "names, revision and port",
        "vllm serve org/Big_Model --served-model-name big other --revision v1 --port 8080",
        {
            "name": "big-model",
            "model.served_name": "big",
            "model.revision": "v1",
            "serve.port": 8080,
        },
    ),
    (
        "docker run",
        "docker run --runtime nvidia --gpus all -it --rm -e NCCL_DEBUG=INFO --ipc=host "
        "-v ~/.cache/huggingface:/root/.cache/huggingface -p 8000:8000 "
        "vllm/vllm-openai:v0.30.0 org/model --tensor-parallel-size 8",
        {
            "model.id": "org/model",
            "parallel.tensor": 8,
            "runtime.vllm": "0.30.0",
            "runtime.env": {"NCCL_DEBUG": "INFO"},
        },
    ),
    (
        "docker run of a model on the host",
        "sudo docker run -d --gpus=all --volume /data/models:/models:ro --shm-size 32g "
        "vllm/vllm-openai:latest --model /models/glm --tensor-parallel-size 8",
        {"model.id": "/data/models/glm", "runtime.vllm": default_release()},
    ),
    (
        "docker run with an entry point and a shell",
        "docker run --gpus all --mount type=bind,source=/data,target=/m --entrypoint /bin/bash "
        "my/image:1 -c 'vllm serve /m/glm -tp 2'",
        {"model.id": "/data/glm", "parallel.tensor": 2},
    ),
    (
        "docker run with a cache elsewhere",
        "docker run -v /nvme/hf:/root/.cache/huggingface vllm/vllm-openai:v0.32.0 org/model",
        {"runtime.env": {"HF_HOME": "/nvme/hf"}},
    ),
    (
        "docker run of vLLM's image for CPUs",
        "docker run --rm -p 8000:8000 vllm/vllm-openai-cpu:v0.32.0 org/model",
        {"runtime.device": "cpu", "runtime.vllm": "0.32.0"},
    ),
    (
        "variables that only CPUs have",
        "VLLM_CPU_KVCACHE_SPACE=4 vllm serve org/model",
        {"runtime.device": "cpu", "runtime.env": {"VLLM_CPU_KVCACHE_SPACE": "4"}},
    ),
    (
        "over ssh",
        "ssh h100-a 'cd /srv && VLLM_LOGGING_LEVEL=INFO vllm serve org/model -tp 8'",
        {"parallel.tensor": 8, "runtime.env": {"VLLM_LOGGING_LEVEL": "INFO"}},
    ),
    (
        "a partition",
        "VLLM_PP_LAYER_PARTITION=42,36 vllm serve org/model -tp 8 -pp 2 --nnodes 2",
        {"parallel.layer_partition": (42, 36), "runtime.env": {}},
    ),
    (
        "repeated flags",
        "vllm serve org/model --dtype half --dtype bfloat16",
        {"serve.args.dtype": "bfloat16"},
    ),
    (
        "unknown flags",
        "vllm serve org/model --brand-new-thing 7 --other-new-thing --third=x",
        {
            "serve.args.brand-new-thing": "7",
            "serve.args.other-new-thing": True,
            "serve.args.third": "x",
        },
    ),
    (
        "Ray before it",
        "ray start --head --port=6379\nvllm serve org/model -tp 8 -pp 2 --nnodes 2 "
        "--distributed-executor-backend ray",
        {"parallel.pipeline": 2, "serve.args": {}},
    ),
]


@pytest.mark.parametrize(("command", "expected"), [f[1:] for f in FORMS], ids=[f[0] for f in FORMS])
def test_form(imported: Import, command: str, expected: dict[str, Any]) -> None:
    cluster = imported(command).cluster
    assert {path: at(cluster, path) for path in expected} == expected


def test_there_are_many_forms() -> None:
    assert len({name for name, _, _ in FORMS}) == len(FORMS) >= 30


REFUSALS: list[tuple[str, str, type[MtpppError], str]] = [
    (
        "another drafter",
        """vllm serve org/m --speculative-config '{"method":"eagle3","model":"o/e","num_"""
        """speculative_tokens":3}'""",
        Refused,
        "speculative method eagle3 with o/e",
    ),
    (
        "n-grams",
        """vllm serve org/m --speculative-config '{"method":"ngram","num_speculative_tokens":3}'""",
        Refused,
        "speculative method ngram",
    ),
    ("data parallel", "vllm serve org/m -tp 8 -dp 2", Refused, "data parallel 2"),
    (
        "half of a pair",
        """vllm serve org/m --kv-transfer-config '{"kv_connector":"N","kv_role":"kv_producer"}'""",
        Refused,
        "prefill half",
    ),
    (
        "a stage over nodes",
        "vllm serve org/m -tp 16 -pp 2 --nnodes 4",
        Refused,
        "a stage would span",
    ),
    ("uneven", "vllm serve org/m -tp 9 --nnodes 4", Refused, "does not come out even"),
    (
        "another scheduler",
        "vllm serve org/m --scheduler-cls my.Scheduler",
        Refused,
        "--scheduler-cls my.Scheduler",
    ),
    ("no model", "vllm serve --tensor-parallel-size 2", ConfigurationError, "names no model"),
    ("no value", "vllm serve org/m --port", ConfigurationError, "--port needs a value"),
    ("no number", "vllm serve org/m -tp two", ConfigurationError, "is no number"),
    ("ambiguous", "vllm serve org/m --max-num 3", ConfigurationError, "could be --max-num"),
    (
        "bad JSON",
        "vllm serve org/m --speculative-config '{method: mtp}'",
        ConfigurationError,
        "not JSON",
    ),
    (
        "a backslash forgotten",
        "vllm serve org/m extra --port 80",
        ConfigurationError,
        "'extra' belongs to no flag",
    ),
    ("an open quote", "vllm serve 'org/m --port 80", ConfigurationError, "is not closed"),
    (
        "a here-document",
        "vllm serve org/m --config <<EOF\nx: 1\nEOF",
        ConfigurationError,
        "here-documents",
    ),
    (
        "a variable without value",
        "vllm serve org/m --max-model-len $LEN",
        ConfigurationError,
        "$LEN has no value",
    ),
    (
        "a command's output",
        "vllm serve org/m --max-num-seqs $(nproc)",
        ConfigurationError,
        "$(nproc) has no value",
    ),
    (
        "two deployments",
        "vllm serve org/a --port 8000 &\nvllm serve org/b --port 8001",
        ConfigurationError,
        "2 commands serve a model",
    ),
    (
        "an environment file",
        "docker run --env-file x.env vllm/vllm-openai:latest org/m",
        ConfigurationError,
        "--env-file x.env is not read",
    ),
    ("no image", "docker run --gpus all", ConfigurationError, "names no image"),
    (
        "a switch with a value",
        "vllm serve org/m --enforce-eager=true",
        ConfigurationError,
        "takes no value",
    ),
]


@pytest.mark.parametrize(
    ("command", "error", "message"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS]
)
def test_refusal(imported: Import, command: str, error: type[MtpppError], message: str) -> None:
    with pytest.raises(error) as caught:
        imported(command)
    assert message in caught.value.message
    assert caught.value.hint


def test_given_variables_win_over_the_script(imported: Import) -> None:
    text = "LEN=1\nvllm serve org/m --max-model-len $LEN"
    assert imported(text, given={"LEN": "512"}).cluster.serve.args == {"max-model-len": 512}


def test_who_imports_says_what_the_nodes_compute_with(imported: Import) -> None:
    assert imported("vllm serve org/m").cluster.runtime.device == "cuda"
    assert imported("vllm serve org/m", device="cpu").cluster.runtime.device == "cpu"
    for_cpus = "VLLM_CPU_KVCACHE_SPACE=4 vllm serve org/m"
    assert imported(for_cpus, device="cuda").cluster.runtime.device == "cuda"
    with pytest.raises(ConfigurationError, match="the command is for CPUs") as caught:
        imported(for_cpus, gpu="H100-80GB")
    assert "--device cuda" in caught.value.hint


def test_a_config_file_is_part_of_the_command(imported: Import, tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text(
        "model: org/m\ntensor_parallel_size: 2\ndtype: half\nenable-prefix-caching: false\n"
        "speculative-config: {method: mtp, num_speculative_tokens: 2}\n"
    )
    cluster = imported("vllm serve --config serve.yaml --dtype bfloat16", base=tmp_path).cluster
    assert cluster.model.id == "org/m"
    assert cluster.parallel.tensor == 2
    assert cluster.speculative is not None
    assert cluster.speculative.tokens == 2
    assert cluster.serve.args == {"dtype": "bfloat16", "enable-prefix-caching": False}


def test_a_config_file_that_is_not_there(imported: Import, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--config no\.yaml: cannot be read"):
        imported("vllm serve org/m --config no.yaml", base=tmp_path)


# ---- nodes -----------------------------------------------------------------------------------

NODE = (
    "GLOO_SOCKET_IFNAME=eth0 VLLM_HOST_IP=10.0.0.{host} vllm serve org/m -tp 8 -pp 2 --nnodes 2 "
    "--node-rank {rank} --master-addr 10.0.0.1 {more}"
)


def test_one_command_per_node(imported: Import) -> None:
    head = NODE.format(host=1, rank=0, more="--port 9000 --reasoning-parser glm45")
    worker = NODE.format(host=2, rank=1, more="--headless")
    cluster = imported(worker, head, nodes=("a", "root@b")).cluster
    assert [(n.host, n.address, n.user) for n in cluster.nodes] == [
        ("a", "10.0.0.1", None),
        ("b", "10.0.0.2", "root"),
    ]
    assert cluster.serve.port == 9000
    assert cluster.serve.args == {"reasoning-parser": "glm45"}
    assert cluster.runtime.env == {}


def test_nodes_that_contradict_each_other(imported: Import) -> None:
    head = NODE.format(host=1, rank=0, more="--dtype half")
    worker = NODE.format(host=2, rank=1, more="--headless --dtype bfloat16")
    with pytest.raises(Refused, match="dtype is 'half' at line 1, 'bfloat16' at"):
        imported(head, worker)


def test_the_first_node_s_command_is_needed(imported: Import) -> None:
    workers = [NODE.format(host=2, rank=rank, more="--headless") for rank in (1, 2)]
    with pytest.raises(ConfigurationError, match=r"--node-rank 0\) is missing"):
        imported(*workers)


def test_an_environment_that_differs_between_nodes(imported: Import) -> None:
    head = f"NCCL_IB_HCA==mlx5_0 {NODE.format(host=1, rank=0, more='')}"
    worker = f"NCCL_IB_HCA==mlx5_1 {NODE.format(host=2, rank=1, more='--headless')}"
    with pytest.raises(Refused, match="NCCL_IB_HCA differs"):
        imported(head, worker)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (("a=10.0.0.7", "b=10.0.0.8"), [("a", "10.0.0.7"), ("b", "10.0.0.8")]),
        (("10.0.0.7", "10.0.0.8"), [("10.0.0.7", "10.0.0.7"), ("10.0.0.8", "10.0.0.8")]),
        (("a", "b"), [("a", "192.0.2.1"), ("b", "192.0.2.2")]),
        ((), [("node-1", "192.0.2.1"), ("node-2", "192.0.2.2")]),
    ],
)
def test_addresses(
    imported: Import, nodes: tuple[str, ...], expected: list[tuple[str, str]]
) -> None:
    result = imported("vllm serve org/m -tp 8 -pp 2 --nnodes 2 --master-addr $H", nodes=nodes)
    assert [(node.host, node.address) for node in result.cluster.nodes] == expected
    placeholders = [address for _, address in expected if address.startswith("192.0.2.")]
    filled = [about for about in result.said("fill in") if about.startswith("nodes")]
    assert len(filled) == len(placeholders)
    assert result.draft.text().count("SET THIS: the address") == len(placeholders)


def test_more_hosts_than_the_command_is_for(imported: Import) -> None:
    with pytest.raises(ConfigurationError, match="for 2 nodes"):
        imported("vllm serve org/m -tp 8 -pp 2 --nnodes 2", nodes=("a", "b", "c"))


# ---- what is said ----------------------------------------------------------------------------


def test_what_is_wrong_with_mtp_is_changed_and_said(imported: Import) -> None:
    result = imported(
        "VLLM_USE_V2_MODEL_RUNNER=0 vllm serve org/m --no-async-scheduling "
        "--distributed-executor-backend mp"
    )
    assert set(result.said("changed")) >= {
        "VLLM_USE_V2_MODEL_RUNNER=0",
        "--no-async-scheduling",
        "--distributed-executor-backend mp",
    }
    assert result.cluster.serve.args == {}


def test_secrets_are_named_and_their_values_forgotten(imported: Import) -> None:
    result = imported(
        "HF_TOKEN=hf_abc vllm serve org/m -tp 2 --api-key sk-123",
        "docker run -e MY_API_KEY vllm/vllm-openai:latest org/m -tp 2 --node-rank 1 --headless"
        " --api-key sk-123",
    )
    assert result.cluster.secrets == ("HF_TOKEN", "MY_API_KEY", "VLLM_API_KEY")
    everything = result.draft.text() + str(result.draft.report())
    assert "hf_abc" not in everything
    assert "sk-123" not in everything


def test_unknown_flags_are_named(imported: Import) -> None:
    assert imported("vllm serve org/m --brand-new 7").said("kept") == ["--brand-new"]


def test_a_flag_that_the_release_lacks(imported: Import) -> None:
    result = imported("vllm serve org/m --calculate-kv-scales")
    assert f"vLLM {default_release()} has no such flag" in result.message("--calculate-kv-scales")


@pytest.mark.parametrize(
    ("sizes", "gpus", "expected"),
    [
        ("-tp 8 -pp 2", None, [("node-1", 8), ("node-2", 8)]),
        ("-tp 2 -pp 4", 4, [("node-1", 4), ("node-2", 4)]),
        ("-tp 8", None, [("node-1", 8)]),
    ],
)
def test_without_nodes_there_is_one_for_each_stage_and_it_is_said(
    imported: Import, sizes: str, gpus: int | None, expected: list[tuple[str, int]]
) -> None:
    result = imported(f"vllm serve org/model {sizes}", gpus=gpus)
    assert [(node.host, node.gpus) for node in result.cluster.nodes] == expected
    assert "nodes" in result.said("fill in")
