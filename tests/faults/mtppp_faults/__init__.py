"""Deployments that are wrong on purpose: a plugin of the tests, never shipped.

Loaded before `mtppp_patches`, it takes parts out of the patches named by MTPPP_FAULT. What is left
is installed as always, so a check that passes now would also pass without those parts.
"""
