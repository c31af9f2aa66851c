"""The entry point, on a stand-in for vLLM."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from mtppp_patches.engine_spec import EngineSpec

Run = Callable[..., subprocess.CompletedProcess[str]]
REGISTER = "import sys\nfrom mtppp_patches.plugin import register\nregister()\n"
NO_PATCHES = "import mtppp_patches.registry as registry\nregistry.PATCHES = ()\n"


def test_outside_a_deployment_nothing_is_even_imported(run_python: Run) -> None:
    done = run_python(
        REGISTER + "assert [m for m in sys.modules if m.startswith('mtppp')] == "
        "['mtppp_patches', 'mtppp_patches.plugin'], sys.modules\n",
        MTPPP_ENGINE="nonsense",
    )
    assert done.returncode == 0, done.stderr


def test_without_a_spec_the_process_stops(run_python: Run) -> None:
    done = run_python(REGISTER, MTPPP_DEPLOYMENT="d")
    assert done.returncode != 0
    assert "MTPPP_ENGINE is not" in done.stderr


def test_the_local_part_of_the_version_does_not_matter(run_python: Run) -> None:
    spec = EngineSpec("0.29.0", "glm4_moe").to_json()
    code = NO_PATCHES + REGISTER + "register()\n"
    done = run_python(code, MTPPP_DEPLOYMENT="d", MTPPP_ENGINE=spec)
    assert done.returncode == 0, done.stderr


def test_another_release_stops_the_process(run_python: Run) -> None:
    spec = EngineSpec("0.30.0", "glm4_moe").to_json()
    done = run_python(REGISTER, MTPPP_DEPLOYMENT="d", MTPPP_ENGINE=spec)
    assert done.returncode != 0
    assert "planned for 0.30.0" in done.stderr
