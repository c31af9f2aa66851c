"""The patches inside real vLLM, without an engine: seconds, not minutes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mtppp_patches.engine_spec import EngineSpec, Speculative
from mtppp_patches.patch import names_needed
from mtppp_patches.registry import PATCHES

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "cluster_configs/models/demo-glm4-moe"
sys.path.append(str(ROOT / "scripts"))

from class_evidence import drafter_problems, run  # noqa: E402

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
    command = [ROOT / "scripts/config_gate.py", "--output", output]
    done = subprocess.run(
        [*command, "--python", vllm_python("0.32.0"), f"{release}={sources}"], check=False
    )
    result = json.loads(output.read_text())["releases"][release]
    assert done.returncode == 0, result
    refused = release == "0.29.0"
    for family in ("glm_moe_dsa", "deepseek_v3", "kimi_k3", "dots3_note", "minimax_m3_vl"):
        assert result["shipped"][family] == ("refused" if refused else "passes")
        assert result["patched"][family] == "passes"


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
}))
"""

PROCESSORS = """
import json, os, sys
from mtppp_patches.engine_guard import require_v2_runner
from mtppp_patches.engine_spec import EngineSpec
from mtppp_patches.patch import PatchError, install, vllm_root
from mtppp_patches.registry import PATCHES
from vllm.config import ModelConfig, VllmConfig

spec = EngineSpec.from_json(os.environ["MTPPP_ENGINE"])
install(PATCHES, spec, spec.release, vllm_root())
model, directory = sys.argv[1:]

def message(variable):
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    if variable:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = variable
    try:
        config = VllmConfig(model_config=ModelConfig(model, skip_tokenizer_init=True))
    except ValueError as error:
        return "vLLM: " + str(error)
    try:
        require_v2_runner(config)
    except PatchError as error:
        return str(error)

told = [message("1"), message(None)]
# Without what was installed beside vLLM.
sys.path.remove(directory)
print(json.dumps([*told, message("1")]))
"""

SOUND = """
import dataclasses, json, sys
from types import SimpleNamespace
from mtppp_patches.attest import watched
from mtppp_patches.engine_guard import require_sound
from mtppp_patches.engine_spec import EngineSpec, Speculative
from mtppp_patches.patch import PatchError, names_needed
from mtppp_patches.registry import PATCHES
from vllm.config import ModelConfig, ParallelConfig

release, directory = sys.argv[1:]

def told(*, planned="mtp", drafts="mtp", family="glm4_moe", risk=(), eplb=False, model={}, **sizes):
    spec = EngineSpec(
        release, family, device="cpu", tensor=2, pipeline=2, at_own_risk=risk,
        speculative=planned and Speculative(planned, 3),
    )
    spec = dataclasses.replace(spec, patches=names_needed(PATCHES, spec))
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2} | sizes
    parallel = ParallelConfig(distributed_executor_backend="ray", **sizes)
    # The class refuses it where there is no GPU.
    parallel.enable_eplb = eplb
    try:
        return require_sound(SimpleNamespace(
            parallel_config=parallel,
            model_config=ModelConfig(directory, skip_tokenizer_init=True, **model),
            speculative_config=drafts and SimpleNamespace(method=drafts, num_speculative_tokens=3),
        ), spec)
    except PatchError as error:
        return str(error)

print(json.dumps({
    "as planned": told(),
    "without drafts": told(drafts=None),
    "one stage": told(pipeline_parallel_size=1),
    "other sizes": told(model={"hf_overrides": {"rope_theta": 1.0}}),
    "eagle3": told(drafts="eagle3"),
    "eagle3 at one's own risk": told(drafts="eagle3", risk=("speculative_method",)),
    "transformers": told(model={"model_impl": "transformers"}),
    "architectures": told(model={"hf_overrides": {"architectures": ["Glm4MoeForCausalLM"]}}),
    "experts": told(family="glm_moe_dsa", data_parallel_size=2, enable_expert_parallel=True),
    "eplb": told(eplb=True, enable_expert_parallel=True),
    "unplanned": told(planned=None),
    "watched": watched(EngineSpec(
        release, "glm4_moe", pipeline=2, data_parallel=2, invariants="stop"
    )),
}))
"""

ENGINE = """
import dataclasses, json, os
from importlib import import_module
from inspect import getattr_static
from types import SimpleNamespace
from mtppp_patches.engine_spec import EngineSpec
from mtppp_patches.patch import install, names_needed, vllm_root
from mtppp_patches.registry import PATCHES
# What a fresh process is handed is of these modules; plugins are not loaded by that.
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.config import ParallelConfig, SchedulerConfig

class WorkersStart(Executor):
    def _init_executor(self):
        raise RuntimeError("workers start")
    def collective_rpc(self, *_, **__): ...
    def check_health(self): ...

scheduler = SchedulerConfig.default_factory()
scheduler.async_scheduling = True
parallel = ParallelConfig(
    tensor_parallel_size=2, pipeline_parallel_size=2, distributed_executor_backend="ray"
)

def config(*lacking):
    return SimpleNamespace(
        parallel_config=parallel,
        model_config=SimpleNamespace(model_impl="auto", hf_overrides={}),
        scheduler_config=scheduler,
        speculative_config=SimpleNamespace(method="mtp", num_speculative_tokens=3),
        use_v2_model_runner=True,
        _get_v2_model_runner_unsupported_features=lambda: lacking,
        **dict.fromkeys(
            ("cache_config", "lora_config", "load_config", "device_config", "observability_config")
        ),
    )

def outcome(make, *arguments, **named):
    try:
        make(*arguments, **named)
    except RuntimeError as error:
        return str(error)

def attributes():
    found = {}
    for patch in PATCHES:
        for target in patch.targets if planned.release in patch.releases else ():
            if target.replace and target.exists_in(planned.release):
                owner = import_module(target.module)
                *path, leaf = target.attribute.split(".")
                for name in path:
                    owner = getattr(owner, name)
                found[target.name] = getattr_static(owner, leaf)
    return found

def replaced(**changes):
    # In a process of its own: one is patched for one deployment.
    reading, writing = os.pipe()
    if not os.fork():
        spec = dataclasses.replace(planned, **changes)
        spec = dataclasses.replace(spec, patches=names_needed(PATCHES, spec))
        install(PATCHES, spec, spec.release, vllm_root())
        after = attributes()
        changed = sorted(name for name in before if after[name] is not before[name])
        os.write(writing, json.dumps(changed).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        return json.load(pipe)

planned = EngineSpec.from_json(os.environ["MTPPP_ENGINE"])
before = attributes()
print(json.dumps([
    {"two stages": replaced(), "one stage": replaced(pipeline=1)},
    outcome(EngineCore, config("dual batch overlap"), WorkersStart, log_stats=False),
    outcome(WorkersStart, config()),
]))
"""

PLUGIN = """
[vllm.general_plugins]
mtppp_patches = mtppp_patches.plugin:register
"""

ENTRY_POINTS = """
[triton.backends]
cpu = mtppp_cpu.triton_backend
[vllm.platform_plugins]
mtppp_cpu = mtppp_cpu.platform_plugin:platform
[vllm.logits_processors]
bias = bias:Bias
"""


def with_entry_points(directory: Path, text: str) -> None:
    """Make what the path has there a distribution with these."""
    info = directory / "plugins-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1\n")
    (info / "entry_points.txt").write_text(text)


def ran(
    python: Path, code: str, *arguments: str | Path, beside: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Code that did not fail, in a fresh process that has the patches, what lies in `beside`, and
    these variables alone."""
    path = [*([beside] if beside else []), ROOT / "patches"]
    done = subprocess.run(
        [python, "-c", code, *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(map(str, path)), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_guard_names_what_turns_them_off(vllm_python: Python, tmp_path: Path) -> None:
    with_entry_points(tmp_path, ENTRY_POINTS)
    deployed = {"MTPPP_DEPLOYMENT": "test", "MTPPP_DEVICE": "cpu"}
    done = ran(vllm_python("0.32.0"), GUARD, beside=tmp_path, **deployed)
    messages = json.loads(done.stdout.splitlines()[-1])
    assert messages["async"] is None
    assert messages["v2"] is None
    assert "--no-async-scheduling" in messages["sync"]
    assert "CpuHostPlatform" in messages["sync"]
    assert "Scheduler is no AsyncScheduler" in messages["scheduler class"]
    assert "dual batch overlap" in messages["v2 lacks"]
    assert "VLLM_USE_V2_MODEL_RUNNER is not set" in messages["v1 unset"]
    assert "VLLM_USE_V2_MODEL_RUNNER is 0" in messages["v1 set"]


def test_a_processor_of_logits_that_comes_with_a_package_is_named_by_vllm_and_by_the_guard(
    vllm_python: Python, tmp_path: Path
) -> None:
    """Nobody asks for it: vLLM takes what is installed, and its V2 runner has no place for it."""
    release = "0.29.0"
    with_entry_points(tmp_path, ENTRY_POINTS)
    spec = EngineSpec(
        release, "glm4_moe", device="cpu", pipeline=2, speculative=Speculative("mtp", 3)
    )
    spec = dataclasses.replace(spec, patches=names_needed(PATCHES, spec))
    deployed = {"MTPPP_DEPLOYMENT": "test", "MTPPP_DEVICE": "cpu", "MTPPP_ENGINE": spec.to_json()}
    done = ran(vllm_python(release), PROCESSORS, MODEL, tmp_path, beside=tmp_path, **deployed)
    as_launched, without_variable, without_processor = json.loads(done.stdout.splitlines()[-1])
    named = "custom logits processors (installed entry points vllm.logits_processors: bias)"
    assert as_launched.startswith("vLLM: ")
    assert f"Model Runner V2 does not yet support: {named}" in as_launched
    # Without the variable vLLM only warns, and takes the V1 runner.
    assert without_variable.startswith("vLLM chose the V1 model runner: ")
    assert named in without_variable
    assert without_processor is None


@pytest.mark.parametrize("release", RELEASES)
def test_only_what_is_needed_is_replaced_and_plugins_that_an_engine_loads_itself_come_in_time(
    vllm_python: Python, tmp_path: Path, release: str
) -> None:
    with_entry_points(tmp_path, PLUGIN)
    spec = EngineSpec(
        release, "glm4_moe", device="cpu", tensor=2, pipeline=2, speculative=Speculative("mtp", 3)
    )
    spec = dataclasses.replace(spec, patches=names_needed(PATCHES, spec))
    deployed = {"MTPPP_DEPLOYMENT": "test", "MTPPP_ENGINE": spec.to_json()}
    done = ran(vllm_python(release), ENGINE, beside=tmp_path, **deployed)
    replaced, first, second = json.loads(done.stdout.splitlines()[-1])
    # Everything else is the original, the same object.
    needed = {
        target.name
        for patch in PATCHES
        for target in patch.targets_for(spec)
        if patch.name in spec.patches and target.replace
    }
    assert set(replaced["two stages"]) == needed
    assert len(needed) == (12 if release == "0.29.0" else 4), "0.32.0 decodes right by itself"
    [attesting] = replaced["one stage"]
    assert attesting.endswith(":WorkerWrapperBase.initialize_from_config")
    assert first.startswith(
        "the V2 model runner of this release does not support: dual batch overlap"
    )
    assert second == "workers start"


@pytest.mark.parametrize("release", RELEASES)
def test_the_engine_refuses_what_it_is_told_beside_its_file(
    vllm_python: Python, release: str
) -> None:
    done = ran(vllm_python(release), SOUND, release, MODEL)
    assert "invariants are not watched" in done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["watched"] == "off"
    assert told["as planned"] is told["other sizes"] is True
    assert told["without drafts"] is told["one stage"] is False
    assert told["eagle3"].startswith(
        f"speculative method eagle3 under pipeline parallelism on vLLM {release}"
    )
    assert told["eagle3 at one's own risk"] is False
    for classes in ("transformers", "architectures"):
        assert "remove --model-class-overrides, --model-impl" in told[classes]
    assert "sum each expert layer's output once per tensor rank" in told["experts"]
    assert "(EPLB) under pipeline parallelism ends the engine" in told["eplb"]
    if release == "0.29.0":
        assert "not planned with: config_gate, draft_relay, structured_drafts" in told["unplanned"]
    else:
        assert told["unplanned"] is True


@pytest.mark.parametrize("release", RELEASES)
def test_the_drafter_takes_the_models_embedding(vllm_python: Python, release: str) -> None:
    """With the patch where vLLM lacks it, and as shipped where vLLM does it itself."""
    runs = run(vllm_python(release), "drafter_world.py")
    assert [*drafter_problems(runs)] == []
    on_amd = {"deepseek_v32.amd.mtp:DeepseekV32MTP"} if release == "0.32.0" else set()
    assert {entry["class"].partition(".models.")[2] for entry in runs} == {
        "deepseek_mtp:DeepSeekMTP",
        "deepseek_v32.nvidia.mtp:DeepseekV32MTP",
        *on_amd,
    }
    assert {entry["patched"] for entry in runs} == (
        {False, True} if release == "0.29.0" else {False}
    )
