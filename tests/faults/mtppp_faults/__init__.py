"""Deployments that are wrong on purpose: a plugin of the tests, never shipped.

Loaded before `mtppp_patches`, it takes out of the patches what TEST_FAULT names, or puts something
in. The rest is installed as always, so a check that passes now would also pass when that is wrong.
"""
