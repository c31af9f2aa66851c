"""vLLM's own model classes over real tensor and pipeline groups, in processes of one machine.

    PYTHON_OF_A_RELEASE pipeline_world.py FAMILY ...

runs each family (nvidia, amd, dots3_note) stock and then patched by the plugin, and prints one JSON
object per run. Constructors, layers, MLP and MoE, sharded loading of a checkpoint, collectives and
the hand-over between stages are vLLM's; only attention, which needs a GPU, is a stand-in with the
same contract: it leaves its output un-summed.

Processes are forked after the imports, so a world costs a second and not a minute.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
os.environ["PYTHONWARNINGS"] = "ignore"
warnings.simplefilter("ignore")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches"))

import torch  # noqa: E402
import vllm  # noqa: E402
from transformers import PretrainedConfig  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.layers.linear import (  # noqa: E402
    ColumnParallelLinear,
    RowParallelLinear,
)
from vllm.sequence import IntermediateTensors  # noqa: E402
from vllm.version import __version__  # noqa: E402

from mtppp_patches import invariants  # noqa: E402
from mtppp_patches.engine_spec import EngineSpec  # noqa: E402
from mtppp_patches.observations import Ledger, Report  # noqa: E402
from mtppp_patches.patch import install, names_needed, vllm_root  # noqa: E402
from mtppp_patches.registry import PATCHES  # noqa: E402

RELEASE = __version__.partition("+")[0]
HIDDEN, LAYERS, TOKENS, EXPERTS = 64, 4, 8, 8

# As far as the invariants look at vLLM's scheduler output and input batch.
PLAN = types.SimpleNamespace(
    num_scheduled_tokens={"a": TOKENS}, scheduled_spec_decode_tokens={}, finished_req_ids=set()
)
BATCH = types.SimpleNamespace(num_tokens=TOKENS, input_ids=torch.arange(TOKENS, dtype=torch.int32))


class Attention(torch.nn.Module):
    """What the layers need of attention: sharded, and the output left un-summed."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str, **_: Any) -> None:
        super().__init__()
        layer = int(prefix.split(".")[-2])
        own = vllm_config.model_config.hf_config.index_topk_pattern[layer] == "F"
        self.indexer = object() if own else None
        self.skip_topk = False
        self.up = ColumnParallelLinear(HIDDEN, 2 * HIDDEN, bias=False, prefix=f"{prefix}.up")
        self.o_proj = RowParallelLinear(
            2 * HIDDEN, HIDDEN, bias=False, reduce_results=False, prefix=f"{prefix}.o_proj"
        )

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        shares: torch.Tensor = self.o_proj(torch.tanh(self.up(hidden_states)[0]))[0]
        return shares


@dataclass(frozen=True)
class Family:
    """One implementation: where it is, and what of it needs a GPU."""

    module: str
    model: str
    attention: tuple[str, ...]
    model_type: str
    device: str


FAMILIES = {
    "nvidia": Family(
        "vllm.models.deepseek_v32.nvidia.model",
        "DeepseekV32Model",
        ("DeepseekV32Attention",),
        "glm_moe_dsa",
        "cuda",
    ),
    "amd": Family(
        "vllm.models.deepseek_v32.amd.model",
        "DeepseekV32Model",
        ("DeepseekV32MLAAttention",),
        "glm_moe_dsa",
        "rocm",
    ),
    "dots3_note": Family(
        "vllm.models.dots3_note.nvidia.model",
        "Dots3NoteModel",
        ("Dots3NoteFullAttention", "Dots3NoteSlidingAttention"),
        "dots3_note",
        "cuda",
    ),
}


@dataclass(frozen=True)
class Case:
    """One forward pass of a model in a world of processes.

    Attributes:
        indexers: by layer, F: has an indexer of its own, S: shares that of the layer before.
    """

    dtype: str = "float32"
    expert_parallel: bool = False
    indexers: str = "F" * LAYERS
    patched: bool = False


@dataclass
class Outcome:
    """What one rank saw.

    Attributes:
        hidden_states: the model's output, on the first rank of the last stage.
        summed: all-reduces over the tensor-parallel group during the forward pass.
        handed_over_equal: whether every tensor handed over was the same on all ranks.
        report: what the invariants' watch observed.
    """

    hidden_states: list[list[float]] | None
    summed: int
    handed_over_equal: bool
    report: Report


def main(families: list[str]) -> int:
    # A process is patched for one deployment, so each family has its own.
    fork = multiprocessing.get_context("fork")
    failed = False
    for name in families:
        process = fork.Process(target=report, args=(name, FAMILIES[name]))
        process.start()
        process.join()
        failed = failed or process.exitcode != 0
    return int(failed)


def report(name: str, family: Family) -> None:
    """Run a family in worlds of several shapes and print what came out."""
    without_gpu(family)
    forwards = patch(family)
    cases = [Case(), Case("bfloat16")]
    worlds = [(2, 2), (4, 2)]
    if name == "nvidia":  # The others share its forward pass or have a copy of it.
        cases += [Case(expert_parallel=True), Case(indexers="FFSF"), Case(indexers="FSFS")]
        worlds.append((2, 4))
    [alone] = run(family, 1, 1, [Case()], forwards)
    tensor_only = {tensor: run(family, tensor, 1, cases, forwards) for tensor in (2, 4)}
    for tensor, pipeline in worlds:
        stock_and_patched = [replace(case, patched=p) for p in (False, True) for case in cases]
        runs = run(family, tensor, pipeline, stock_and_patched, forwards)
        same = tensor_only[tensor] * 2
        for case, ranks, same_ranks in zip(stock_and_patched, runs, same, strict=True):
            result = compare(ranks, same_ranks, output_of(alone))
            layout = {"tensor": tensor, "pipeline": pipeline, **asdict(case)}
            print(json.dumps({"release": RELEASE, "family": name, **layout, **result}), flush=True)


def compare(
    ranks: list[Outcome], tensor_only: list[Outcome], alone: torch.Tensor
) -> dict[str, Any]:
    """A pipeline's outcome against the same tensor parallelism without, and against one process."""
    output = output_of(ranks)
    ledger = Ledger()
    violations = ledger.take(rank.report for rank in ranks)
    return {
        "relative_error": float((output - alone).norm() / alone.norm()),
        "equal_to_tensor_only": bool((output == output_of(tensor_only)).all()),
        "summed": sorted({rank.summed for rank in ranks}),
        "summed_tensor_only": tensor_only[0].summed,
        "handed_over_equal": all(rank.handed_over_equal for rank in ranks),
        "checks": {name: n for name, n in ledger.checks.items() if n},
        "violated": sorted({violation.invariant for violation in violations}),
    }


def output_of(outcomes: list[Outcome]) -> torch.Tensor:
    return torch.tensor(next(o.hidden_states for o in outcomes if o.hidden_states is not None))


def patch(family: Family) -> dict[bool, Any]:
    """Do what the plugin does at start-up; returns the model's forward, stock and patched."""
    model = getattr(import_module(family.module), family.model)
    stock = model.forward
    parallel = {"tensor": 2, "pipeline": 2, "device": family.device, "invariants": "count"}
    planned = names_needed(PATCHES, EngineSpec(RELEASE, family.model_type, **parallel))
    spec = EngineSpec(RELEASE, family.model_type, **parallel, patches=planned)
    install(PATCHES, spec, RELEASE, vllm_root())
    return {False: stock, True: model.forward}


def without_gpu(family: Family) -> None:
    """Import the family's module with stand-ins for what cannot be imported or run on a CPU."""
    package = Path(vllm.__file__).parent / "models" / "dots3_note"
    for path in (package, package / "nvidia"):
        name = ".".join(("vllm", *path.relative_to(Path(vllm.__file__).parent).parts))
        bare = types.ModuleType(name)
        bare.__path__ = [str(path)]
        sys.modules[name] = bare
    backends = types.ModuleType("vllm.models.dots3_note.nvidia.attention")
    for name in ("FlashAttnPrefill", "PaddedSparse", "TritonMLA"):
        setattr(backends, f"Dots3Note{name}Backend", None)
    sys.modules[backends.__name__] = backends

    module = import_module(family.module)
    for name in family.attention:
        assert hasattr(module, name)
        setattr(module, name, Attention)
    # From 0.30 on: shares the indexer's result on a stream of the GPU.
    for name in ("SparseMLAIndexGroupBuilder", "get_sparse_mla_index_group_max_rows"):
        if hasattr(module, name):
            setattr(module, name, lambda *_: None)
    experts = import_module("vllm.model_executor.layers.fused_moe.experts.cpu_moe")
    experts.cpu_fused_moe = only_local_experts(experts.cpu_fused_moe)
    # Tensors between stages go over gloo, as between hosts, and not through shared memory.
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda *_: False


def only_local_experts(kernel: Any) -> Any:
    """The CPU's kernel takes every expert for local; without this it cannot run EP."""

    def cpu_fused_moe(*arguments: Any) -> Any:
        *leading, gate_up, down, bias, down_bias, weights, ids, act, isa, skip = arguments
        group = parallel_state.get_ep_group() if gate_up.shape[0] < EXPERTS else None
        local = ids - (group.rank_in_group * gate_up.shape[0] if group else 0)
        held = (local >= 0) & (local < gate_up.shape[0])
        return kernel(
            *leading,
            gate_up,
            down,
            bias,
            down_bias,
            torch.where(held, weights, 0),
            torch.where(held, local, 0),
            act,
            isa,
            skip,
        )

    return cpu_fused_moe


def run(
    family: Family, tensor: int, pipeline: int, cases: list[Case], forwards: dict[bool, Any]
) -> list[list[Outcome]]:
    """Forward passes of the whole model in one world; for each case an outcome per rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in range(tensor * pipeline)]
    processes = [
        fork.Process(
            target=run_rank,
            args=((tensor, pipeline, rank, port), family, cases, forwards, sending),
        )
        for rank, (_, sending) in enumerate(pipes)
    ]
    for process, (_, sending) in zip(processes, pipes, strict=True):
        process.start()
        sending.close()
    by_rank = [receiving.recv() for receiving, _ in pipes]
    for process in processes:
        process.join()
    return [list(ranks) for ranks in zip(*by_rank, strict=True)]


def run_rank(
    place: tuple[int, int, int, int],
    family: Family,
    cases: list[Case],
    forwards: dict[bool, Any],
    pipe: Any,
) -> None:
    tensor, pipeline, rank, port = place
    with set_current_vllm_config(vllm_config(tensor, pipeline, Case())):
        parallel_state.init_distributed_environment(
            tensor * pipeline, rank, f"tcp://127.0.0.1:{port}", rank, "gloo"
        )
        parallel_state.initialize_model_parallel(tensor, pipeline)
    outcomes = []
    for case in cases:
        config = vllm_config(tensor, pipeline, case)
        dtype = getattr(torch, case.dtype)
        torch.set_default_dtype(dtype)
        with set_current_vllm_config(config):
            model_class = getattr(import_module(family.module), family.model)
            model_class.forward = forwards[case.patched]
            model = model_class(vllm_config=config, prefix="")
            model.load_weights(checkpoint(dtype))
            for module in model.modules():
                method = getattr(module, "quant_method", None)
                if hasattr(method, "process_weights_after_loading"):
                    method.process_weights_after_loading(module)
            with torch.inference_mode(), set_forward_context(None, config, num_tokens=TOKENS):
                outcomes.append(forward(model, dtype))
    pipe.send(outcomes)
    torch.distributed.barrier()
    os._exit(0)


def forward(model: Any, dtype: torch.dtype) -> Outcome:
    """One stage's step: receive, compute, hand over, the way vLLM's worker does it."""
    pipeline, tensor = parallel_state.get_pp_group(), parallel_state.get_tp_group()
    received = None
    if not pipeline.is_first_rank:
        tensors, handles, finish = pipeline.irecv_tensor_dict(all_gather_group=tensor)
        for handle in handles:
            handle.wait()
        for complete in finish:
            complete()
        received = IntermediateTensors(tensors)
    embedded = None
    if pipeline.is_first_rank:
        random = torch.Generator().manual_seed(1)
        embedded = torch.randn(TOKENS, HIDDEN, generator=random, dtype=torch.float32).to(dtype)

    summed = 0
    all_reduce = tensor.all_reduce

    def counted(tensor_to_sum: torch.Tensor) -> Any:
        nonlocal summed
        summed += 1
        return all_reduce(tensor_to_sum)

    tensor.all_reduce = counted
    watch = invariants.WATCH = invariants.Watch()
    watch.serve()
    output = model(None, torch.arange(TOKENS), received, inputs_embeds=embedded)
    tensor.all_reduce = all_reduce

    handed_over = None if pipeline.is_last_rank else output
    watch.hear(PLAN)
    watch.step(BATCH, handed_over)
    report = invariants.report(None)
    if pipeline.is_last_rank:
        first = tensor.rank_in_group == 0
        hidden_states = output.tolist() if first else None
        return Outcome(hidden_states, summed, handed_over_equal=True, report=report)
    equal = all(
        bool((part == value).all())
        for value in output.tensors.values()
        for part in tensor.all_gather(value, 0).chunk(tensor.world_size)
    )
    for handle in pipeline.isend_tensor_dict(output.tensors, all_gather_group=tensor):
        handle.wait()
    return Outcome(None, summed, equal, report)


def vllm_config(tensor: int, pipeline: int, case: Case) -> VllmConfig:
    model = PretrainedConfig(
        model_type="deepseek_v32",
        vocab_size=128,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        moe_intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        n_routed_experts=EXPERTS,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        hidden_act="silu",
        norm_topk_prob=True,
        n_group=1,
        topk_group=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        routed_scaling_factor=2.5,
        rms_norm_eps=1e-5,
        index_topk=4,
        index_topk_pattern=case.indexers,
        num_attention_heads=4,
        tie_word_embeddings=False,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
    )
    config = VllmConfig()
    parallel = config.parallel_config
    parallel.tensor_parallel_size = tensor
    parallel.pipeline_parallel_size = pipeline
    parallel.world_size = tensor * pipeline
    parallel.enable_expert_parallel = case.expert_parallel
    # A real ModelConfig wants a directory and inspects the model in another process.
    object.__setattr__(
        config,
        "model_config",
        types.SimpleNamespace(
            hf_config=model,
            hf_text_config=model,
            dtype=getattr(torch, case.dtype),
            head_dtype=getattr(torch, case.dtype),
            is_moe=True,
            use_mla=True,
            quantization=None,
            enforce_eager=True,
            max_model_len=64,
            runner_type="generate",
        ),
    )
    return config


def checkpoint(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """The same weights in every world, under a checkpoint's names."""
    random = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=random, dtype=torch.float32)
        return (2 * values / shape[-1] ** 0.5).to(dtype)

    def mlp(prefix: str, inner: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{prefix}.gate_proj.weight", weight(inner, HIDDEN)
        yield f"{prefix}.up_proj.weight", weight(inner, HIDDEN)
        yield f"{prefix}.down_proj.weight", weight(HIDDEN, inner)

    for index in range(LAYERS):
        layer = f"layers.{index}"
        yield f"{layer}.input_layernorm.weight", 1 + weight(HIDDEN)
        yield f"{layer}.post_attention_layernorm.weight", 1 + weight(HIDDEN)
        yield f"{layer}.self_attn.up.weight", weight(2 * HIDDEN, HIDDEN)
        yield f"{layer}.self_attn.o_proj.weight", weight(HIDDEN, 2 * HIDDEN)
        if index == 0:
            yield from mlp(f"{layer}.mlp", 2 * HIDDEN)
            continue
        yield f"{layer}.mlp.gate.weight", weight(EXPERTS, HIDDEN)
        yield f"{layer}.mlp.gate.e_score_correction_bias", weight(EXPERTS).float()
        for expert in range(EXPERTS):
            yield from mlp(f"{layer}.mlp.experts.{expert}", HIDDEN)
        yield from mlp(f"{layer}.mlp.shared_experts", HIDDEN)
    yield "norm.weight", 1 + weight(HIDDEN)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
