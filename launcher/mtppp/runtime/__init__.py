"""How vLLM is had on a node."""
