"""A Triton backend called `cpu`, for kernels that run in Triton's interpreter.

vLLM's V2 runner is written in Triton, whose wheels have backends for GPUs only. The interpreter
runs kernels in numpy and needs no backend, but vLLM takes Triton for unusable without an active
driver. So there is one, and it never compiles anything.

Triton imports this package while it collects its backends, which is before it defines its first
kernel. `TRITON_INTERPRET` counts at the definition of each kernel, Triton's own included: here is
the only place in a plugin that is early enough in every process.
"""

import os

from mtppp_cpu import request

if request.is_active():
    os.environ["TRITON_INTERPRET"] = "1"
