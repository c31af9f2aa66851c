"""mtppp: launch vLLM over several hosts with PP + MTP, and prove the tokens are right."""

__version__ = "0.1.0"
