"""vLLM's CPU worker, which warms up as a GPU's does and can be one of several stages."""

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.version import __version_tuple__


def _nothing(*_: Any, **__: Any) -> None:
    """On a CPU everything is done when a call returns."""


if __version_tuple__[:2] < (0, 27):
    # A stage receives what another sampled on a stream beside its main one. Until then the
    # stand-ins for streams that vLLM's worker puts in place have only what a single stage calls.
    torch.cuda.Stream.record_event = torch.cuda.Stream.wait_event = _nothing
    torch.Tensor.record_stream = _nothing


class WarmedUpWorker(CPUWorker):
    """Runs the steps that GPU workers run before they serve.

    They go through the stages like a request's, so what a pipeline's stages disagree on shows in
    them first. Up to 0.32 vLLM leaves them out on CPUs.
    """

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        # From 0.33 the CPU worker has warmed up itself.
        if self.use_v2_model_runner and __version_tuple__[:2] < (0, 33):
            from vllm.v1.worker.gpu.warmup import warmup_kernels

            warmup_kernels(self.model_runner, self.execute_model, self.sample_tokens)
        return times
