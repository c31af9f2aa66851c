"""Whether CPU hosts are asked for, and how a GPU is noticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mtppp_cpu import request
from mtppp_cpu.entry_points import ENTRY_POINTS
from mtppp_cpu.refusal import CpuHostError, RefusedPlatform

PATCHES = Path(__file__).resolve().parents[2] / "patches"
ASKED = {"MTPPP_DEPLOYMENT": "d", "MTPPP_DEVICE": "cpu"}


def host(root: Path, *files: str) -> Path:
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def test_asked_for_by_device_and_deployment_together() -> None:
    assert request.is_requested(ASKED)
    assert not request.is_requested({"MTPPP_DEPLOYMENT": "d"})
    assert not request.is_requested({"MTPPP_DEVICE": "cpu"})
    assert not request.is_requested({**ASKED, "MTPPP_DEPLOYMENT": ""})
    assert not request.is_requested({**ASKED, "MTPPP_DEVICE": "cuda"})


@pytest.mark.parametrize(
    "device",
    ["dev/nvidia0", "dev/nvidia15", "dev/nvgpu", "usr/lib/wsl/lib/libcuda.so.1", "dev/kfd"],
)
def test_a_gpu_is_noticed(tmp_path: Path, device: str) -> None:
    assert request.gpus(host(tmp_path, "dev/null", device)) == [tmp_path / device]


def test_graphics_and_a_driver_without_a_card_are_no_gpu(tmp_path: Path) -> None:
    root = host(tmp_path, "dev/dri/renderD128", "dev/nvidiactl", "dev/nvidia-uvm", "dev/nvme0")
    assert request.gpus(root) == []


def test_active_only_if_asked_for_and_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "is_requested", lambda: True)
    monkeypatch.setattr(request, "gpus", list)
    assert request.is_active()
    monkeypatch.setattr(request, "gpus", lambda: [Path("/dev/nvidia0")])
    assert not request.is_active()
    monkeypatch.setattr(request, "is_requested", lambda: False)
    monkeypatch.setattr(request, "gpus", list)
    assert not request.is_active()


@pytest.mark.parametrize(
    ("gpus", "reason"),
    [([Path("/dev/kfd")], r"this host has a GPU \(/dev/kfd\)"), ([], "is no CPU build")],
)
def test_a_refusal_says_why(monkeypatch: pytest.MonkeyPatch, gpus: list[Path], reason: str) -> None:
    monkeypatch.setattr(request, "gpus", lambda: gpus)
    with pytest.raises(CpuHostError, match=reason):
        RefusedPlatform()


def test_what_the_launcher_reads_imports_neither_triton_nor_vllm() -> None:
    code = (
        "import sys, mtppp_cpu.entry_points, mtppp_cpu.request\n"
        "print(sorted({'torch', 'triton', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(PATCHES)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_entry_points_name_what_exists() -> None:
    backend = PATCHES / ENTRY_POINTS["triton.backends"]["cpu"].replace(".", "/")
    assert (backend / "compiler.py").is_file()
    assert (backend / "driver.py").is_file()
    module, _, function = ENTRY_POINTS["vllm.platform_plugins"]["mtppp_cpu"].partition(":")
    assert f"def {function}(" in (PATCHES / f"{module.replace('.', '/')}.py").read_text()
