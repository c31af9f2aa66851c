"""The patches inside real vLLM, without an engine: seconds, not minutes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Releases for which an environment for CPU hosts is made.
RELEASES = ("0.29.0", "0.32.0")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

Python = Callable[[str], Path]


@pytest.mark.parametrize("release", RELEASES)
def test_the_public_reproduction(vllm_python: Python, tmp_path: Path, release: str) -> None:
    output = tmp_path / "result.json"
    # The release's python code alone, on one set of dependencies: 0.29.0 does not get on with the
    # transformers that its own requirements bring today.
    [package] = vllm_python(release).parents[1].glob("lib/python3*/site-packages/vllm")
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "vllm").symlink_to(package)
    command = [ROOT / "scripts/config_gate.py", "--published-only", "--output", output]
    done = subprocess.run(
        [*command, "--python", vllm_python("0.32.0"), f"{release}={sources}"], check=False
    )
    result = json.loads(output.read_text())["releases"][release]
    assert done.returncode == 0, result
    refused = release == "0.29.0"
    assert result["shipped"]["glm_moe_dsa"] == ("refused" if refused else "passes")
    assert result["patched"]["glm_moe_dsa"] == "passes"


GUARD = """
import json, os
from types import SimpleNamespace
from mtppp_patches.engine_guard import require_async_scheduler, require_v2_runner
from mtppp_patches.patch import PatchError
from vllm.config import SchedulerConfig
from vllm.v1.core.sched.scheduler import Scheduler

def scheduler(**changes):
    config = SchedulerConfig.default_factory()
    for name, value in ({"async_scheduling": True} | changes).items():
        setattr(config, name, value)
    require_async_scheduler(SimpleNamespace(scheduler_config=config))

def runner(v2, *features, variable=None):
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    if variable:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = variable
    require_v2_runner(SimpleNamespace(
        use_v2_model_runner=v2,
        _get_v2_model_runner_unsupported_features=lambda: list(features),
    ))

def message(check, *arguments, **named):
    try:
        check(*arguments, **named)
    except PatchError as error:
        return str(error)

print(json.dumps({
    "async": message(scheduler),
    "sync": message(scheduler, async_scheduling=False),
    "scheduler class": message(scheduler, scheduler_cls=Scheduler),
    "v2": message(runner, True),
    "v2 lacks": message(runner, True, "dual batch overlap"),
    "v1 unset": message(runner, False),
    "v1 set": message(runner, False, variable="0"),
    "logits processor": message(runner, True, "custom logits processors"),
}))
"""

ENTRY_POINTS = """
[triton.backends]
cpu = mtppp_cpu.triton_backend
[vllm.platform_plugins]
mtppp_cpu = mtppp_cpu.platform_plugin:platform
[vllm.logits_processors]
bias = bias:Bias
"""


def test_the_guard_names_what_turns_them_off(vllm_python: Python, tmp_path: Path) -> None:
    info = tmp_path / "plugins-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    done = subprocess.run(
        [vllm_python("0.32.0"), "-c", GUARD],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{tmp_path}:{ROOT / 'patches'}",
            "MTPPP_DEPLOYMENT": "test",
            "MTPPP_DEVICE": "cpu",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    messages = json.loads(done.stdout.splitlines()[-1])
    assert messages["async"] is None
    assert messages["v2"] is None
    assert "--no-async-scheduling" in messages["sync"]
    assert "CpuHostPlatform" in messages["sync"]
    assert "Scheduler is no AsyncScheduler" in messages["scheduler class"]
    assert "dual batch overlap" in messages["v2 lacks"]
    assert "VLLM_USE_V2_MODEL_RUNNER is not set" in messages["v1 unset"]
    assert "VLLM_USE_V2_MODEL_RUNNER is 0" in messages["v1 set"]
    assert "vllm.logits_processors: bias" in messages["logits processor"]


# The real class, its load_weights and a real embedding; stand-ins for the layers around them.
DRAFTER = """
import importlib, json, os, sys
from types import SimpleNamespace
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from mtppp_patches.drafter_weights import EMBEDDING, PATCH
from mtppp_patches.engine_spec import EngineSpec, Speculative
from mtppp_patches.patch import PatchError, install, vllm_root

module, name, patched = sys.argv[1], sys.argv[2], sys.argv[3] == "patched"
if patched:
    spec = EngineSpec("0.29.0", "glm_moe_dsa", pipeline=2, speculative=Speculative("mtp", 3),
                      patches=(PATCH.name,))
    install((PATCH,), spec, "0.29.0", vllm_root())
drafter_class = getattr(importlib.import_module(module), name)
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
init_distributed_environment(1, 0, f"file://{sys.argv[4]}", 0, "gloo")
with set_current_vllm_config(VllmConfig()):
    initialize_model_parallel(1, 1)
    drafter = drafter_class.__new__(drafter_class)
    nn.Module.__init__(drafter)
    drafter.config = SimpleNamespace(n_routed_experts=2, n_shared_experts=1, num_hidden_layers=4,
                                     num_nextn_predict_layers=1, model_type="glm_moe_dsa")
    drafter.is_fused_shared_expert_enabled = False
    drafter.model = nn.Module()
    drafter.model.mtp_start_layer_idx, drafter.model.num_mtp_layers = 4, 1
    drafter.model.embed_tokens = VocabParallelEmbedding(64, 8)
    layer = nn.Module()
    layer.enorm = nn.LayerNorm(8, bias=False)
    drafter.model.layers = nn.ModuleDict({"4": layer})
    nn.init.constant_(drafter.model.embed_tokens.weight, 7.0)
    rows = torch.arange(512.0).reshape(64, 8)
    weights = [(EMBEDDING, rows), ("model.layers.4.enorm.weight", torch.full((8,), 3.0))]
    loaded = drafter.load_weights(iter(weights))
    try:
        without = sorted(drafter.load_weights(iter(weights[1:])))
    except PatchError as error:
        without = str(error)
print(json.dumps({
    "embedding": torch.equal(drafter.model.embed_tokens.weight[:64], rows),
    "layer": bool((layer.enorm.weight == 3).all()),
    "loaded": sorted(loaded),
    "without": without,
}))
"""


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vllm.model_executor.models.deepseek_mtp", "DeepSeekMTP"),
        ("vllm.models.deepseek_v32.nvidia.mtp", "DeepseekV32MTP"),
    ],
)
def test_the_drafter_takes_the_models_embedding(
    vllm_python: Python, tmp_path: Path, module: str, name: str
) -> None:
    results = {}
    for how in ("shipped", "patched"):
        done = subprocess.run(
            [vllm_python("0.29.0"), "-c", DRAFTER, module, name, how, tmp_path / how],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "patches")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        results[how] = json.loads(done.stdout.splitlines()[-1])
    assert not results["shipped"]["embedding"]
    assert results["patched"]["embedding"]
    assert results["patched"]["layer"]
    assert "model.embed_tokens.weight" in results["patched"]["loaded"]
    assert "no model.embed_tokens.weight" in results["patched"]["without"]
