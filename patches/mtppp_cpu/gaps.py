"""Mends what the V2 runner meets on a CPU host, in Triton's interpreter (3.9) and in itself.

- The conjunction of two comparisons may come out as integers, and storing under such a mask fails
  with `mask has unsupported dtype`: the kernel that applies a grammar's mask to the logits does it.
- Functions of a device's math library do nothing: `log1p` is in the kernels that sample at a
  temperature.
- The kernel that keeps the most probable tokens (top_k, top_p) takes a Python number for a tensor;
  vLLM has the same in torch.
- Triton's interpreter turns its whole language over at every call of one kernel's function by
  another, where it is turned over since the kernel's start: a seventh of an engine's time.
- Sparse attention is refused, and its indexer is for GPUs: `sparse_attention` has both.
- Up to 0.27 the runner asks for page-locked memory for a grammar's mask whatever the device.
- Who waits for a message in shared memory polls without a pause for a second: on a GPU host a spare
  core, here a core that the stage it waits for computes on.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

from mtppp_cpu import request

POLL_INTERVAL = 2e-4
"""Seconds between two looks for a message in shared memory."""


def register() -> None:
    """Mend them; a `vllm.general_plugins` entry point, called any number of times."""
    if not request.is_active():
        return
    import torch
    from triton.language.extra import libdevice
    from triton.runtime import interpreter
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.v1.sample.ops import topk_topp_sampler

    from mtppp_cpu import sparse_attention

    topk_topp_sampler.apply_top_k_top_p_triton = functools.partial(
        topk_topp_sampler.apply_top_k_top_p_pytorch, allow_cpu_sync=True
    )
    sparse_attention.install()
    libdevice.log1p = log1p
    shm_broadcast.sched_yield = functools.partial(time.sleep, POLL_INTERVAL)
    if not hasattr(torch.tensor, "__wrapped__"):
        torch.tensor = _unpinned(torch.tensor)
    for name, position in (("create_masked_load", 1), ("create_masked_store", 2)):
        original = getattr(interpreter.InterpreterBuilder, name)
        if not hasattr(original, "__wrapped__"):
            setattr(interpreter.InterpreterBuilder, name, _with_boolean_mask(original, position))
    if not hasattr(interpreter._patch_lang, "__wrapped__"):
        interpreter._patch_lang = _once_in_a_kernel(
            interpreter._patch_lang, interpreter._LangPatchScope
        )


def log1p(x: Any) -> Any:
    """log(1 + x) of a tensor of the interpreter."""
    import numpy as np
    from triton.language.core import tensor
    from triton.runtime.interpreter import TensorHandle

    return tensor(TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)


def _unpinned(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def tensor(*arguments: Any, pin_memory: bool = False, **named: Any) -> Any:
        return original(*arguments, **named)

    return tensor


def _once_in_a_kernel(
    original: Callable[..., Any], unchanged: Callable[[], Any]
) -> Callable[..., Any]:
    """Turn the language over for the functions of a module once, until the kernel has ended.

    Only the kernel restores the language: Triton drops the scopes of the functions it calls.
    """
    turned_over: set[int] = set()

    @functools.wraps(original)
    def patch_lang(function: Any) -> Any:
        module = id(function.__globals__)
        if module in turned_over:
            return unchanged()
        scope = original(function)
        turned_over.add(module)
        restore = scope.restore

        def restore_all() -> None:
            turned_over.clear()
            restore()

        scope.restore = restore_all
        return scope

    return patch_lang


def _with_boolean_mask(original: Callable[..., Any], position: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def masked(self: Any, *arguments: Any) -> Any:
        mask = arguments[position]
        mask.data = mask.data.astype(bool)
        return original(self, *arguments)

    return masked
