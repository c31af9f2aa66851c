"""Taking turns, ending members, removing a lab whatever state it is in."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from .console import LabError
from .kernel import call, link_names, mark_of, marked
from .names import STATE, Lab

LOCK_SECONDS = 90.0
STOP_SECONDS = 15.0


@contextlib.contextmanager
def lock() -> Iterator[int]:
    """One `scripts/lab` at a time changes anything.

    The lock is on a directory that every Debian has, so that no lock file is left behind. It is
    inherited by all that `up` starts, until that is complete: holding it means that nothing of an
    earlier, killed `up` is still on its way.
    """
    directory = STATE.parent
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    os.set_inheritable(descriptor, True)
    deadline = time.monotonic() + LOCK_SECONDS
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LabError(
                        f"another scripts/lab has held the lock on {directory} for "
                        f"{LOCK_SECONDS:.0f} s",
                        "`lslocks` tells which process: let it finish or end it, then try again",
                    ) from None
                time.sleep(0.02)
        yield descriptor
    finally:
        os.close(descriptor)


def end(lab: Lab, member: str | None = None) -> list[str]:
    """Kill a member or all, and wait until they are gone; return the members' names."""
    ended: set[str] = set()
    deadline = time.monotonic() + STOP_SECONDS
    while True:
        left = {pid: name for pid, name in marked(lab).items() if member in (None, name)}
        if not left:
            return sorted(ended)
        if time.monotonic() > deadline:
            raise LabError(f"these processes do not end: {', '.join(map(str, left))}")
        for pid, name in left.items():
            kill_marked(lab, pid, deadline)
            ended.add(name)


def kill_marked(lab: Lab, pid: int, deadline: float) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # Looked at again now that the descriptor pins the process: the pid may have been re-used.
        if (mark_of(pid) or ("",))[0] == lab.name:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
    finally:
        os.close(descriptor)


def remove(lab: Lab) -> list[str]:
    """Remove all there is of a lab; return what that was."""
    removed = end(lab)
    if lab.link in link_names():
        # It may vanish by itself between the look and the deletion: its peer's namespace is gone.
        with contextlib.suppress(LabError):
            call("ip", "link", "delete", lab.link)
        removed.append(f"link {lab.link}")
        if lab.link in link_names():
            raise LabError(f"link {lab.link} cannot be deleted")
    if lab.directory.exists():
        remove_directory(lab.directory)
        removed.append(str(lab.directory))
    with contextlib.suppress(OSError):
        STATE.rmdir()
    return removed


def remove_directory(path: Path) -> None:
    # The lab mounts nothing outside its hosts. A mount here is someone else's data.
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if Path(line.split()[4]).is_relative_to(path):
            raise LabError(
                f"{line.split()[4]} is a mount: not deleting {path}", "umount it, try again"
            )
    shutil.rmtree(path)
