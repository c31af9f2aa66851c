"""Servers of `scripts/verify_matrix.py`: nothing is left of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from verify_matrix import stop

# As vLLM's ranks for CPUs: a child has the segment mapped, and nobody removes it.
RANK = """
import mmap, sys, time
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    segment = mmap.mmap(file.fileno(), 4096)
print("mapped", flush=True)
time.sleep(600)
"""
LEADER = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


def test_stop_ends_the_ranks_and_removes_their_segments() -> None:
    segment = Path("/dev/shm", f"vllm_dist_{uuid4().hex}")
    process = subprocess.Popen(
        [sys.executable, "-c", LEADER, RANK, segment],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"mapped\n"
    try:
        stop(process)
        assert not segment.exists()
        # The rank had the other end.
        assert process.stdout.read() == b""
    finally:
        segment.unlink(missing_ok=True)
