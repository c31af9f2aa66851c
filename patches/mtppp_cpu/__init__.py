"""Lets vLLM's V2 runner and Ray executor run on hosts without GPUs, for the demo and the tests.

vLLM has a CPU build, but its CPU platform leaves out what a multi-node deployment needs: Triton
(the V2 runner is written in it), a device that Ray can schedule, asynchronous scheduling, and
collectives that cross hosts. Two plugins add these, for vLLM 0.23.0 to 0.33.0:

    triton_backend    a Triton backend called `cpu`: its kernels run in Triton's interpreter
    platform_plugin   has vLLM use `platform.CpuHostPlatform`, a subclass of its CPU platform

`latent_attention` and `sparse_attention` are what the platform gives for models whose attention
vLLM has wrong for drafts on CPUs, or not at all.

`entry_points` declares them, `request` decides whether they are active. They never are where a GPU
is present. Importing this package imports nothing.
"""
