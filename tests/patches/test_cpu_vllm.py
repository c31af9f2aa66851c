"""The CPU plugins inside real vLLM, release by release.

Asked is an interpreter of that release's environment, where the plugins are on the path exactly as
the launcher puts them on a node: one for all that needs no process of its own.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtppp.plan.plugins import bundle

RELEASES = ("0.27.1", "0.29.0", "0.32.0")
MODEL = Path(__file__).resolve().parents[2] / "cluster_configs" / "models" / "demo-glm4-moe"

# Importing vLLM is most of the time each test takes, several times that on a busy machine.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

GPU_HOST = """
from pathlib import Path
from mtppp_cpu import request
request.gpus = lambda: [Path("/dev/nvidia0")]
"""

BACKEND = """
import json, os
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
import triton
print(json.dumps({
    "platform": type(current_platform).__name__,
    "usable": bool(HAS_TRITON),
    "interpreter": os.environ.get("TRITON_INTERPRET"),
    "active": triton.backends.backends["cpu"].driver.is_active(),
    "kernel": type(triton.language.standard.cdiv).__name__,
}))
"""

TRITON_ALONE = """
import json, os
from triton.backends import backends
print(json.dumps({
    "active": backends["cpu"].driver.is_active(),
    "interpreter": os.environ.get("TRITON_INTERPRET"),
}))
"""

KERNEL = """
import json
from vllm.triton_utils import tl, triton
import torch

@triton.jit
def double(values, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(values + at, 2 * tl.load(values + at, mask=inside), mask=inside)

values = torch.arange(10)
double[(triton.cdiv(10, 4),)](values, 10, BLOCK=4)

# vLLM decorates helpers like this; nothing may be compiled, a host may have no C++ compiler.
compiled = torch.compile(lambda: torch.compiler.is_compiling())
print(json.dumps({
    "driver": type(triton.runtime.driver.active).__name__,
    "values": values.tolist(),
    "compiled": compiled(),
}))
"""

SAMPLING = """
import json
import torch
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 8))
kept = apply_top_k_top_p(logits, torch.tensor([3] * 8), torch.tensor([0.6] * 8))
print(json.dumps([row.isfinite().tolist() for row in kept]))
"""

CALLS = """
import json
from vllm.plugins import load_general_plugins
from vllm.triton_utils import tl, triton
load_general_plugins()
from triton.runtime import interpreter
import torch

prepared = []
patch = interpreter._patch_builtin
interpreter._patch_builtin = lambda *arguments: prepared.append(1) or patch(*arguments)
language = vars(tl.core) | vars(tl)

@triton.jit
def square(x):
    return x * x

@triton.jit
def squares(values, TIMES: tl.constexpr):
    at = tl.program_id(0)
    for _ in range(TIMES):
        tl.store(values + at, square(tl.load(values + at)))

def run(times):
    prepared.clear()
    values = torch.full((4,), 2.0)
    squares[(4,)](values, TIMES=times)
    return values.tolist(), len(prepared)

once, often = run(1), run(3)
print(json.dumps({
    "values": [once[0], often[0]],
    "as often": once[1] == often[1],
    "restored": vars(tl.core) | vars(tl) == language,
}))
"""

WAITING = """
import json, time
import zmq
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.utils.network_utils import get_open_zmq_ipc_path

reader = SpinCondition(True, zmq.Context(), get_open_zmq_ipc_path())
end, computed = time.monotonic() + 0.4, time.process_time()
while time.monotonic() < end:
    reader.wait(timeout_ms=100)
print(json.dumps(time.process_time() - computed))
"""

SCHEDULING = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

def config(asked):
    return EngineArgs(
        model=sys.argv[1],
        async_scheduling=asked,
        pipeline_parallel_size=2,
        distributed_executor_backend="ray",
        enforce_eager=True,
    ).create_engine_config()

print(json.dumps({
    "asked": {str(a): config(a).scheduler_config.async_scheduling for a in (True, False)},
    "v2": config(True).use_v2_model_runner,
    "ray": current_platform.ray_device_key,
}))
"""

COMMUNICATOR = """
import json, os, sys, tempfile
import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
import vllm._custom_ops

# Of this process: one that was killed has left its memory under its own.
os.environ["VLLM_DIST_IDENT"] = f"mtppp-test-{os.getpid()}"
current_platform.import_kernels()
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1
)
group = torch.distributed.group.WORLD

def transport(communicator_class):
    communicator = communicator_class(
        cpu_group=group, device=torch.device("cpu"), device_group=group, unique_name="pp:0"
    )
    return getattr(communicator.dist_module, "__name__", type(communicator.dist_module).__name__)

ours = resolve_obj_by_qualname(current_platform.get_device_communicator_cls())
print(json.dumps({
    "class": f"{ours.__module__}.{ours.__name__}",
    "ours": transport(ours),
    "vllm": transport(CpuCommunicator),
}))
"""

# Asked of one process in this order: platform and kernels before general plugins are loaded.
TOGETHER = (BACKEND, KERNEL, SCHEDULING, SAMPLING, CALLS, WAITING, COMMUNICATOR)
ONE_BY_ONE = """
import contextlib, io, json, sys, traceback

answers = []
for number, code in enumerate(json.load(sys.stdin)):
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            exec(compile(code, f"code {number}", "exec"), {"__name__": "__main__"})
        answers.append({"answer": json.loads(said.getvalue().splitlines()[-1])})
    except Exception:
        answers.append({"failed": traceback.format_exc()})
print(json.dumps(answers))
"""

Run = Callable[..., subprocess.CompletedProcess[str]]
Ask = Callable[[str], Any]


@pytest.fixture(scope="session")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plugins")
    for name, content in bundle(["mtppp_cpu"]).files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


@pytest.fixture(scope="module", params=RELEASES)
def run(request: pytest.FixtureRequest, vllm_python: Callable[[str], Path], plugins: Path) -> Run:
    python = vllm_python(request.param)

    def run(code: str, *, asked: bool = True, given: str = "") -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(plugins),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CONFIG_ROOT": str(plugins / "config"),
            "VLLM_CACHE_ROOT": str(plugins / "cache"),
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if asked:
            environment |= {"MTPPP_DEPLOYMENT": "test", "MTPPP_DEVICE": "cpu"}
        return subprocess.run(
            [python, "-c", code, MODEL],
            env=environment,
            input=given,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def value_of(done: subprocess.CompletedProcess[str]) -> Any:
    """The JSON on the last line of what was printed."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def ask(run: Run) -> Ask:
    """What a code of `TOGETHER` answers."""
    answers = dict(
        zip(TOGETHER, value_of(run(ONE_BY_ONE, given=json.dumps(TOGETHER))), strict=True)
    )

    def ask(code: str) -> Any:
        assert "failed" not in answers[code], answers[code]["failed"]
        return answers[code]["answer"]

    return ask


def test_asked_for_the_platform_and_triton_are_ours(ask: Ask) -> None:
    assert ask(BACKEND) == {
        "platform": "CpuHostPlatform",
        "usable": True,
        "interpreter": "1",
        "active": True,
        "kernel": "InterpretedFunction",
    }


def test_kernels_run_interpreted_and_nothing_is_compiled(ask: Ask) -> None:
    assert ask(KERNEL) == {
        "driver": "InterpreterDriver",
        "values": [2 * i for i in range(10)],
        "compiled": False,
    }


def test_not_asked_for_vllm_keeps_its_own_platform(run: Run) -> None:
    found = value_of(run(BACKEND, asked=False))
    assert found["platform"] == "CpuPlatform"
    assert found["interpreter"] is None
    assert not found["active"]
    assert found["kernel"] == "JITFunction"


def test_asked_for_on_a_gpu_host_the_process_says_why_and_stops(run: Run) -> None:
    done = run(GPU_HOST + "from vllm.platforms import current_platform")
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == (
        "mtppp_cpu.refusal.CpuHostError: mtppp: MTPPP_DEVICE=cpu asks for CPU hosts, but this host "
        "has a GPU (/dev/nvidia0); deploy on its GPUs instead, or choose hosts without"
    )


def test_on_a_gpu_host_triton_keeps_its_own_backends(run: Run) -> None:
    found = value_of(run(GPU_HOST + TRITON_ALONE))
    assert found == {"active": False, "interpreter": None}


def test_requests_for_the_most_probable_tokens_are_sampled_from_those(ask: Ask) -> None:
    assert ask(SAMPLING) == [[True, True, False, False]] * 8


def test_a_kernel_turns_the_language_over_once_whatever_it_calls(ask: Ask) -> None:
    assert ask(CALLS) == {
        "values": [[4.0] * 4, [256.0] * 4],
        "as often": True,
        "restored": True,
    }


def test_waiting_for_a_message_leaves_the_core_to_others(ask: Ask) -> None:
    assert ask(WAITING) < 0.2, "seconds of CPU for 0.4 s of waiting"


def test_the_scheduling_asked_for_is_kept(ask: Ask) -> None:
    assert ask(SCHEDULING) == {"asked": {"True": True, "False": False}, "v2": True, "ray": "GPU"}


def test_collectives_use_the_network_even_where_shared_memory_would_do(ask: Ask) -> None:
    assert ask(COMMUNICATOR) == {
        "class": "mtppp_cpu.communicator.CrossHostCommunicator",
        "ours": "torch.distributed",
        "vllm": "_CPUSHMDistributed",
    }
