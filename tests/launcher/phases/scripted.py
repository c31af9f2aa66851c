"""Commands of a Plan with a script in place of the program, and what ranks would attest."""

from __future__ import annotations

import sys
from dataclasses import replace

from mtppp.plan.plan import Command, Plan
from mtppp_patches.registry import PATCHES

SLEEP = "import time; time.sleep(600)"


def running(command: Command, script: str) -> Command:
    """The command, running a python script."""
    return replace(command, argv=(sys.executable, "-u", "-c", script))


def patches_in_place(plan: Plan) -> dict[str, dict[str, list[str]]]:
    """What a rank attests of its patches when it has replaced all that there is to replace."""
    return {
        patch.name: {
            "targets": [
                target.name
                for target in patch.targets
                if target.replace and target.exists_in(plan.vllm)
            ],
            "pending": [],
        }
        for patch in PATCHES
        if patch.name in plan.patches
    }
