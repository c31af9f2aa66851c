"""Commands of a Plan with a script in place of the program."""

from __future__ import annotations

import sys
from dataclasses import replace

from mtppp.plan.plan import Command

SLEEP = "import time; time.sleep(600)"


def running(command: Command, script: str) -> Command:
    """The command, running a python script."""
    return replace(command, argv=(sys.executable, "-u", "-c", script))
