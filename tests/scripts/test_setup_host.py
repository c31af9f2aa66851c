"""What the set-up says of what it cannot install."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import setup_host


def test_without_root_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(setup_host, "VLLM_LIBRARIES", {"libnone.so.1": "libnone1"})
    with pytest.raises(
        setup_host.SetupError, match=r"^missing: libnone1; apt-get install libnone1$"
    ):
        setup_host.vllm_environment("0.32.0")


def test_a_library_that_is_there_is_found() -> None:
    assert setup_host.loadable("libc.so.6")
    assert not setup_host.loadable("libnone.so.1")
