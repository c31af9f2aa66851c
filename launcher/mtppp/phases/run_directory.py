"""Names of what a run directory holds beside logs."""

from __future__ import annotations

from mtppp.plan import environment
from mtppp_patches import gate

PLAN_FILE = "plan.json"
"""The Plan as it was launched; stays after a stop."""
LAUNCH_FILE = "launch.json"
"""Who launched the deployment, from where and when, and the GPU memory in use before: not in the
Plan, which has no time."""
CLUSTER_FILE = "cluster.json"
"""What the operator's side remembers, for one that has lost it: `mtppp list HOST`."""
SHARED_MEMORY_FILE = "shared-memory.json"
"""Segments in /dev/shm that the deployment had mapped when it became ready."""
CHECKED_FILE = "checked.json"
"""On the first node: when a launch had checked every rank and seen the first tokens."""
ATTEST = "attest"
INVARIANTS_FILE = "invariants.json"
"""How often each invariant was checked and did not hold, as the engine counts on its node."""

SERVER_ONLY = (
    ATTEST,
    CHECKED_FILE,
    SHARED_MEMORY_FILE,
    INVARIANTS_FILE,
    gate.KEY_FILE,
    gate.SERVER_FILE,
    gate.OPEN_FILE,
)
"""What is there only while the server runs."""
LAUNCH_ONLY = (
    environment.TOKEN_FILE,
    environment.CONFIG_ROOT,
    "processes.json",
    LAUNCH_FILE,
    CLUSTER_FILE,
    *SERVER_ONLY,
)
"""What is there only while the deployment runs; logs and Plan stay."""
