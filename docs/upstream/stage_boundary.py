"""A pipeline stage of DeepseekV32Model hands over un-summed shares of its last layer's output.

    python stage_boundary.py        # vLLM for CPUs alone, 0.29.0 to 0.32.0; half a minute

Builds vLLM's own NVIDIA model class (DeepSeek-V3.2, GLM-5.2) over real process groups: tensor
parallelism alone, and with two stages, tensors handed over as vLLM's workers do. Only attention,
whose kernels need a GPU, is a stand-in: sharded like the original, its output left un-summed as the
original leaves it.
"""

import multiprocessing
import os
import socket
import types
import zlib

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")

import torch
from transformers import PretrainedConfig
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state, tensor_model_parallel_all_reduce
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.models.deepseek_v32.nvidia import model as nvidia
from vllm.sequence import IntermediateTensors

LAYERS, HIDDEN, TOKENS = 4, 64, 8


class Attention(torch.nn.Module):
    """In place of DeepseekV32Attention."""

    def __init__(self, *, prefix, **_):
        super().__init__()
        self.up = ColumnParallelLinear(HIDDEN, HIDDEN, bias=False, prefix=f"{prefix}.up")
        self.down = RowParallelLinear(
            HIDDEN, HIDDEN, bias=False, reduce_results=False, prefix=f"{prefix}.down"
        )

    def forward(self, positions, hidden_states):
        return self.down(torch.tanh(self.up(hidden_states)[0]))[0]


def mended(model, received):
    """The forward pass with the sum made before the hand-over.

    The first layer of the next stage sums what it is given, once more: all its ranks but one
    present zeros. x + 0 is exact in every format.
    """
    if received is not None and parallel_state.get_tp_group().rank_in_group > 0:
        received.tensors["hidden_states"] = torch.zeros_like(received["hidden_states"])
    output = model.forward(None, torch.arange(TOKENS), received, embedded())
    if isinstance(output, IntermediateTensors):
        summed = tensor_model_parallel_all_reduce(output["hidden_states"])
        output.tensors["hidden_states"] = summed
    return output


def embedded():
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


def configuration(tensor, stages):
    model = PretrainedConfig(
        model_type="deepseek_v32", vocab_size=128, hidden_size=HIDDEN, intermediate_size=128,
        num_hidden_layers=LAYERS, first_k_dense_replace=LAYERS, n_routed_experts=None,
        moe_layer_freq=1, hidden_act="silu", rms_norm_eps=1e-5, routed_scaling_factor=1.0,
        num_attention_heads=4, index_topk=4, tie_word_embeddings=False,
    )  # fmt: skip
    config = VllmConfig()
    config.parallel_config.tensor_parallel_size = tensor
    config.parallel_config.pipeline_parallel_size = stages
    config.parallel_config.world_size = tensor * stages
    served = types.SimpleNamespace(
        hf_config=model, hf_text_config=model, dtype=torch.float32, head_dtype=torch.float32,
        is_moe=False, use_mla=True, quantization=None, enforce_eager=True, max_model_len=64,
        runner_type="generate",
    )  # fmt: skip
    object.__setattr__(config, "model_config", served)
    return config


def fill(model):
    """The same weights in every layout."""
    group = parallel_state.get_tp_group()
    rank, ranks = group.rank_in_group, group.world_size
    for name, parameter in model.named_parameters():
        shape, sharded = list(parameter.shape), None
        if "up" in name.rsplit(".", 2)[-2]:
            sharded = 0
        elif "down" in name.rsplit(".", 2)[-2]:
            sharded = 1
        if sharded is not None:
            shape[sharded] *= ranks
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(shape, generator=random)
        values = 2 * values / shape[-1] ** 0.5 if len(shape) > 1 else 1 + 0.1 * values
        if name.endswith("gate_up_proj.weight"):
            # Gate and up are sharded each.
            values = torch.cat([part.chunk(ranks)[rank] for part in values.chunk(2)])
        elif sharded is not None:
            values = values.chunk(ranks, sharded)[rank]
        parameter.data = values.contiguous()
    for module in model.modules():
        if hasattr(getattr(module, "quant_method", None), "process_weights_after_loading"):
            module.quant_method.process_weights_after_loading(module)


def run_rank(rank, tensor, stages, mend, port, pipe):
    nvidia.DeepseekV32Attention = Attention
    for name in ("SparseMLAIndexGroupBuilder", "get_sparse_mla_index_group_max_rows"):
        if hasattr(nvidia, name):
            setattr(nvidia, name, lambda *_: None)
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda *_: False
    config = configuration(tensor, stages)
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            tensor * stages, rank, f"tcp://127.0.0.1:{port}", rank, "gloo"
        )
        parallel_state.initialize_model_parallel(tensor, stages)
        model = nvidia.DeepseekV32Model(vllm_config=config, prefix="")
    fill(model)
    pipeline, ranks, received = parallel_state.get_pp_group(), parallel_state.get_tp_group(), None
    if not pipeline.is_first_rank:
        received = IntermediateTensors(pipeline.recv_tensor_dict(all_gather_group=ranks))
    with torch.inference_mode(), set_forward_context(None, config, num_tokens=TOKENS):
        if mend:
            output = mended(model, received)
        else:
            output = model.forward(None, torch.arange(TOKENS), received, embedded())
    if isinstance(output, IntermediateTensors):
        pipeline.send_tensor_dict(output.tensors, all_gather_group=ranks)
        output = None
    pipe.send(None if output is None else output.tolist())
    torch.distributed.barrier()
    os._exit(0)


def run(tensor, stages, mend=False):
    """The model's output."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in range(tensor * stages)]
    for rank, (_, sending) in enumerate(pipes):
        arguments = (rank, tensor, stages, mend, port, sending)
        fork.Process(target=run_rank, args=arguments).start()
    return torch.tensor([receiving.recv() for receiving, _ in pipes][-1])


def main():
    alone = run(1, 1)
    for tensor, stages, mend in ((2, 1, False), (1, 2, False), (2, 2, False), (2, 2, True)):
        output = run(tensor, stages, mend)
        error = float((output - alone).norm() / alone.norm())
        print(f"TP{tensor} x PP{stages}{', mended' * mend}: relative error {error:.1e}")


if __name__ == "__main__":
    main()
