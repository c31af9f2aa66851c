"""Lets vLLM's V2 runner and Ray executor run on hosts without GPUs, for the demo and the tests."""
