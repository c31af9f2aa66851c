"""The `vllm.general_plugins` entry point.

vLLM calls it in the API server, in EngineCore, in every worker and in the subprocess that inspects
models, possibly several times. A plugin that fails to import is only logged, an exception in its
function stops the process: so this module imports nothing that can fail, and all work is done in
`register`.
"""

from __future__ import annotations

import os


def register() -> None:
    """Install the patches that this deployment needs; do nothing outside a deployment of mtppp.

    Raises:
        InvalidSpecError, PatchError: the engine must not run; vLLM's process ends with the message.
    """
    if "MTPPP_DEPLOYMENT" not in os.environ:
        return
    from vllm.version import __version__

    from mtppp_patches.engine_spec import SPEC_VARIABLE, EngineSpec
    from mtppp_patches.patch import PatchError, install, vllm_root
    from mtppp_patches.registry import PATCHES

    text = os.environ.get(SPEC_VARIABLE)
    if text is None:
        raise PatchError(
            f"MTPPP_DEPLOYMENT is set but {SPEC_VARIABLE} is not: this process was not started by "
            "`mtppp launch`. Unset MTPPP_DEPLOYMENT to run vLLM without mtppp."
        )
    release = __version__.partition("+")[0]
    install(PATCHES, EngineSpec.from_json(text), release, vllm_root())
