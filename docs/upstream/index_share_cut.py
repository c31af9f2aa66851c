"""A pipeline stage that begins with a layer without an indexer attends with stale indices.

    python index_share_cut.py        # vLLM for CPUs alone, 0.29.0 to 0.32.0; half a minute

Builds vLLM's own DeepseekV2Model (what GlmMoeDsaForCausalLM wraps) with GLM-5.2's schedule of
indexers, index_topk_freq 4 and index_skip_topk_offset 3, on one stage and on two, and computes two
steps of two prompts each. Only what needs a GPU is a stand-in: the attention kernel, which reads
row t of the indices for token t of the step, and the indexer's, which writes it.
"""

import itertools
import multiprocessing
import os
import socket
import types
import zlib

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")

import torch
from transformers import PretrainedConfig
from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import mla
from vllm.model_executor.models import deepseek_v2
from vllm.sequence import IntermediateTensors

LAYERS, HIDDEN, TOP = 12, 64, 16
STEPS = ((24, 24), (40, 8))  # Tokens of the prompts in each step.


class Step:
    """The step under way: where its prompts begin and end, and what was read that must not be."""

    prompts = ()
    foreign = 0


class Indexing(torch.nn.Module):
    """In place of SparseAttnIndexer: row t has the best positions for token t, then -1."""

    def __init__(self, *arguments, **_):
        super().__init__()
        self.buffer = arguments[-1]

    def forward(self, hidden_states, q, k, weights):
        self.buffer[: len(q)] = -1
        for prompt in Step.prompts:
            scores = torch.einsum("thd,pd->thp", q[prompt], k[prompt]).relu()
            scores = (scores * weights[prompt, :, None]).sum(1)
            causal = torch.ones_like(scores).tril().bool()
            best = scores.masked_fill(~causal, -torch.inf).argsort(dim=-1, descending=True)[:, :TOP]
            best = best.masked_fill(~causal.gather(1, best), -1)
            self.buffer[prompt, : best.shape[1]] = best.int()


class SparseAttention(torch.nn.Module):
    """In place of MLAAttention: token t attends to the positions in row t of the buffer."""

    impl = types.SimpleNamespace(record_logical_topk_ready=lambda: None)

    def __init__(self, *, kv_b_proj, topk_indices_buffer, scale, v_head_dim, prefix, **_):
        super().__init__()
        self.expand, self.buffer, self.scale = [kv_b_proj], topk_indices_buffer, scale
        self.values, self.layer_name = v_head_dim, prefix

    def forward(self, q, latents, rotary, output_shape, **_):
        tokens, heads, _ = q.shape
        both = self.expand[0](latents)[0].view(tokens, heads, -1)
        keys, values = both[..., : -self.values], both[..., -self.values :]
        keys = torch.cat((keys, rotary.expand(-1, heads, -1)), -1)
        out = torch.zeros_like(values)
        for prompt in Step.prompts:
            rows, length = self.buffer[prompt].long(), prompt.stop - prompt.start
            # Positions behind the prompt. In a paged cache other requests' blocks are there.
            Step.foreign += int((rows >= length).sum())
            seen = torch.zeros(length, length + 1).bool()
            seen.scatter_(1, rows.masked_fill((rows < 0) | (rows >= length), length), True)
            scores = torch.einsum("thd,phd->htp", q[prompt], keys[prompt]) * self.scale
            weights = scores.masked_fill(~seen[:, :-1], -1e9).softmax(-1)
            out[prompt] = torch.einsum("htp,phd->thd", weights, values[prompt])
        return out.reshape(output_shape)


def configuration(stages):
    model = PretrainedConfig(
        model_type="glm_moe_dsa", vocab_size=128, hidden_size=HIDDEN, intermediate_size=128,
        num_hidden_layers=LAYERS, first_k_dense_replace=LAYERS, n_routed_experts=None,
        moe_layer_freq=1, hidden_act="silu", rms_norm_eps=1e-5, routed_scaling_factor=1.0,
        num_attention_heads=2, q_lora_rank=32, kv_lora_rank=64, qk_nope_head_dim=16,
        qk_rope_head_dim=64, v_head_dim=16, max_position_embeddings=64, tie_word_embeddings=False,
        index_topk=TOP, index_n_heads=2, index_head_dim=128, index_topk_freq=4,
        index_skip_topk_offset=3, indexer_rope_interleave=True,
    )  # fmt: skip
    # A rotation that is as none is scaled; vLLM's CPU kernel for the plain type wants other shapes.
    model.rope_parameters = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 1.0, "mscale": 1.0,
        "original_max_position_embeddings": 64, "mscale_all_dim": 1.0,
    }  # fmt: skip
    config = VllmConfig()
    config.parallel_config.pipeline_parallel_size = config.parallel_config.world_size = stages
    config.cache_config = CacheConfig(block_size=16)
    config.attention_config.sparse_mla_prefill_workspace_factor = 5
    served = types.SimpleNamespace(
        hf_config=model, hf_text_config=model, dtype=torch.float32, head_dtype=torch.float32,
        is_moe=False, use_mla=True, quantization=None, enforce_eager=True, max_model_len=64,
        runner_type="generate",
    )  # fmt: skip
    object.__setattr__(config, "model_config", served)
    return config


def run_stage(stage, stages, cut, port, pipe):
    if cut:
        os.environ["VLLM_PP_LAYER_PARTITION"] = cut
    mla.MLAAttention, deepseek_v2.SparseAttnIndexer = SparseAttention, Indexing
    deepseek_v2.per_token_group_quant_fp8 = lambda q, *_, **__: (q, torch.ones(len(q), 1))
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda *_: False
    config = configuration(stages)
    with set_current_vllm_config(config):
        address = f"tcp://127.0.0.1:{port}"
        parallel_state.init_distributed_environment(stages, stage, address, stage, "gloo")
        parallel_state.initialize_model_parallel(1, stages)
        model = deepseek_v2.DeepseekV2Model(vllm_config=config, prefix="")
    for name, parameter in model.named_parameters():
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(parameter.shape, generator=random)
        parameter.data = 1 + 0.1 * values if parameter.dim() == 1 else values * 0.15
    for module in model.modules():
        if hasattr(getattr(module, "quant_method", None), "process_weights_after_loading"):
            module.quant_method.process_weights_after_loading(module)
    group, outputs = parallel_state.get_pp_group(), []
    for lengths in STEPS:
        ends = list(itertools.accumulate(lengths))
        Step.prompts = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        tokens = ends[-1]
        positions = torch.cat([torch.arange(length) for length in lengths])
        received = None
        if stage > 0:
            received = IntermediateTensors(group.recv_tensor_dict())
        ids = torch.arange(tokens) * 7 % 128
        with torch.inference_mode(), set_forward_context(None, config, num_tokens=tokens):
            output = model.forward(ids, positions, received)
        if isinstance(output, IntermediateTensors):
            group.send_tensor_dict(output.tensors)
        else:
            outputs.append(output)
    pipe.send((model.start_layer, Step.foreign, [o.tolist() for o in outputs]))
    torch.distributed.barrier()
    os._exit(0)


def run(stages, cut=None):
    """(first layer of the last stage, foreign positions read there, output of each step)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in range(stages)]
    for stage, (_, sending) in enumerate(pipes):
        fork.Process(target=run_stage, args=(stage, stages, cut, port, sending)).start()
    first, foreign, outputs = [receiving.recv() for receiving, _ in pipes][-1]
    return first, foreign, [torch.tensor(output) for output in outputs]


def main():
    torch.set_default_dtype(torch.float32)
    _, _, expected = run(1)
    for cut in ("6,6", "7,5"):
        first, foreign, outputs = run(2, cut)
        errors = [float((o - e).norm() / e.norm()) for o, e in zip(outputs, expected, strict=True)]
        print(
            f"stages {cut}, the second begins with layer {first}: relative error "
            f"{errors[0]:.1e} in the first step, {errors[1]:.1e} in the second; "
            f"{foreign} positions read behind the end of a prompt"
        )


if __name__ == "__main__":
    main()
