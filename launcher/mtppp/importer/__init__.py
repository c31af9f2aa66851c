"""From the `vllm serve` commands and recipes people have to a cluster file that is right."""
