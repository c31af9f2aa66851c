"""Mends Triton's interpreter where the V2 runner's kernels meet its faults.

In the interpreter the conjunction of two comparisons may come out as integers (Triton 3.9), and
storing under such a mask fails with `mask has unsupported dtype`. vLLM's kernel that applies a
grammar's mask to the logits does that: structured output would not run on CPU hosts.
"""

import functools

from mtppp_cpu import request


def register() -> None:
    """Let loads and stores take any mask; a `vllm.general_plugins` entry point."""
    if not request.is_active():
        return
    from triton.runtime.interpreter import InterpreterBuilder

    for name, position in (("create_masked_load", 1), ("create_masked_store", 2)):
        original = getattr(InterpreterBuilder, name)
        if not hasattr(original, "__wrapped__"):
            setattr(InterpreterBuilder, name, _with_boolean_mask(original, position))


def _with_boolean_mask(original, position):
    @functools.wraps(original)
    def masked(self, *arguments):
        mask = arguments[position]
        mask.data = mask.data.astype(bool)
        return original(self, *arguments)

    return masked
