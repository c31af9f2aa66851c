"""The framework, on a stand-in for vLLM: verify everything, then replace; or stop."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

# Two patches, of which the first replaces three attributes and the second wraps one of them again.
PATCHES = """
import json, sys
from pathlib import Path
import mtppp_patches.patch as patch_module
from mtppp_patches.engine_spec import EngineSpec
from mtppp_patches.fingerprint import fingerprint
from mtppp_patches.patch import *

def add(n):
    def replace(original, spec):
        def replacement(*arguments):
            return original(*arguments) + n
        return replacement
    return replace

FIRST = Patch("first", "why", ("0.29.0",), "0.30.0", lambda spec: spec.pipeline > 1, (
    Target("vllm.engine", "Engine.step", add(10)),
    Target("vllm.engine", "Engine.twice", add(10)),
    Target("vllm.late", "late", add(10)),
    Target("vllm.engine", "helper"),
))
SECOND = Patch("second", "why", ("0.29.0",), "0.30.0", lambda spec: spec.pipeline > 1, (
    Target("vllm.engine", "Engine.step", add(100)),
))
ALL = (FIRST, SECOND)
ROOT = vllm_root()
KNOWN = {
    target.name: {"0.29.0": fingerprint(ROOT, target.module, target.attribute)}
    for patch in ALL for target in patch.targets
}
patch_module.known_fingerprints = lambda: KNOWN
PP2 = EngineSpec("0.29.0", "m", pipeline=2, patches=("first", "second"))
"""


def test_all_targets_are_replaced_imported_or_not(run_python: Run) -> None:
    done = run_python(
        PATCHES
        + """
from vllm.engine import Engine
install(ALL, PP2, "0.29.0", ROOT)
install(ALL, PP2, "0.29.0", ROOT)
assert (Engine().step(1), Engine.twice(1), Engine().twice(2)) == (112, 12, 14)
assert applied()[0] == Applied(
    "first", ("vllm.engine:Engine.step", "vllm.engine:Engine.twice"), ("vllm.late:late",))
from vllm.late import late
assert late() == 11
assert [a.pending for a in applied()] == [(), ()]
assert displaced() == []
Engine.twice = staticmethod(lambda n: n)
assert displaced() == ["vllm.engine:Engine.twice"]
"""
    )
    assert done.returncode == 0, done.stderr


def test_where_nothing_is_needed_every_target_is_the_original(run_python: Run) -> None:
    done = run_python(
        PATCHES
        + """
from inspect import getattr_static
import vllm.engine as e
before = [getattr_static(e.Engine, "step"), getattr_static(e.Engine, "twice"), e.helper]
install(ALL, EngineSpec("0.29.0", "m"), "0.29.0", ROOT)
import vllm.late
after = [getattr_static(e.Engine, "step"), getattr_static(e.Engine, "twice"), e.helper]
assert all(a is b for a, b in zip(before, after))
assert vllm.late.late() == 1 and applied() == []
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("imported", [True, False])
@pytest.mark.parametrize("changed", ["return n + 1", 'return "original"', "return 1"])
def test_an_unknown_source_stops_before_anything_is_replaced(
    run_python: Run, fake_vllm: Path, changed: str, imported: bool
) -> None:
    done = run_python(
        PATCHES
        + f"""
for file in ROOT.glob("*.py"):
    file.write_text(file.read_text().replace({changed!r}, "return 5"))
if {imported}:
    import vllm.engine
try:
    install(ALL, PP2, "0.29.0", ROOT)
except PatchError as error:
    print(error)
from inspect import getattr_static
import vllm.engine, vllm.late
assert vllm.engine.Engine().step(1) in (2, 5) and vllm.engine.Engine.twice(1) == 2
assert vllm.late.late() in (1, 5) and applied() == []
"""
    )
    assert done.returncode == 0, done.stderr
    assert "patch first: the source of vllm." in done.stdout
    assert "0.29.0" in done.stdout
    assert "mtppp patches" in done.stdout


def test_an_unrecorded_fingerprint_stops(run_python: Run) -> None:
    done = run_python(
        PATCHES + 'KNOWN["vllm.engine:helper"] = {}\ninstall(ALL, PP2, "0.29.0", ROOT)\n'
    )
    assert "no fingerprint of vllm.engine:helper is recorded for vLLM 0.29.0" in done.stderr


def test_a_removed_definition_stops(run_python: Run) -> None:
    done = run_python(
        PATCHES + '(ROOT / "late.py").write_text("")\ninstall(ALL, PP2, "0.29.0", ROOT)\n'
    )
    assert "patch first, vLLM 0.29.0: vllm.late defines no late" in done.stderr


def test_another_release_than_planned_stops(run_python: Run) -> None:
    done = run_python(PATCHES + 'install(ALL, PP2, "0.28.0", ROOT)\n')
    assert "vLLM 0.28.0 runs here but the deployment was planned for 0.29.0" in done.stderr


@pytest.mark.parametrize("planned", ['("first",)', "()", '("first", "second", "third")'])
def test_disagreement_on_the_patches_stops(run_python: Run, planned: str) -> None:
    done = run_python(
        PATCHES
        + f'install(ALL, EngineSpec("0.29.0", "m", pipeline=2, patches={planned}), "0.29.0", ROOT)'
    )
    assert "launcher and plugin disagree on the patches for vLLM 0.29.0" in done.stderr


@pytest.mark.parametrize("module", ["engine", "late"])
def test_a_target_that_another_plugin_replaced_stops(run_python: Run, module: str) -> None:
    names = {"engine": "vllm.engine.Engine.step", "late": "vllm.late.late"}
    done = run_python(
        PATCHES + f"import vllm.{module}\n{names[module]} = lambda *a: 0\n"
        'install(ALL, PP2, "0.29.0", ROOT)\n'
    )
    assert "was already replaced by <string>" in done.stderr


def test_a_wrapper_of_another_plugin_does_not_hide(run_python: Run) -> None:
    done = run_python(
        PATCHES
        + """
import functools, vllm.engine
original = vllm.engine.Engine.step
@functools.wraps(original)
def wrapper(self, n):
    return original(self, n)
vllm.engine.Engine.step = wrapper
install(ALL, PP2, "0.29.0", ROOT)
"""
    )
    assert "was already replaced by <string>" in done.stderr


def test_a_second_deployment_in_one_process_stops(run_python: Run) -> None:
    done = run_python(
        PATCHES + 'install(ALL, PP2, "0.29.0", ROOT)\n'
        'install(ALL, EngineSpec("0.29.0", "m"), "0.29.0", ROOT)'
    )
    assert "already patched for another deployment" in done.stderr
