"""What mtppp changes inside vLLM's processes; loaded through `vllm.general_plugins`.

    plugin.py         the entry point: reads the environment, installs what is needed
    engine_spec.py    what the launcher tells the plugin about the deployment
    patch.py          what a patch is; verifying and replacing, all or nothing
    fingerprint.py    identifies a piece of vLLM's source without importing it
    registry.py       the patches there are, one file each
    support.py        which combinations are proven, and which are refused (support.json)

Everything but the replacements themselves is standard library, so that the launcher can import it
where there is no vLLM.
"""
