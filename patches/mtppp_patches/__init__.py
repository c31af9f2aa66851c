"""What mtppp changes inside vLLM's processes; loaded through `vllm.general_plugins`."""
