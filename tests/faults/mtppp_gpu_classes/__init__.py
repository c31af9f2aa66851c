"""vLLM's model classes for NVIDIA GPUs on CPU hosts: a plugin of the tests, never shipped.

For GLM-5.2's architecture vLLM takes a generic class on CPUs, and the fault that `stage_boundary`
mends is not in it. With this plugin an engine takes the class that it has for GPUs. All of that
class runs as it is, but:

- `fused_norm_rope`, `fused_q` and `fused_eh_norm`, Triton kernels, are `operators` in plain torch
  (Triton's interpreter runs them too, unchanged, far more slowly; the tests compare the two);
- `sparse_attn_indexer` and the backend of sparse attention, CUDA kernels, are those of `mtppp_cpu`;
- `fused_allreduce_rms_norm` takes its own way out where there is no FlashInfer: an all-reduce, and
  then the norm. With it the GEMMs for single models of GPU, which are off elsewhere.
"""
