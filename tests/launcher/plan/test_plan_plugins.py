"""What is shipped to the nodes, and that python there finds its entry points."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtppp import __version__
from mtppp.plan.plugins import PluginBundle, bundle

DIST_INFO = f"mtppp_plugins-{__version__}.dist-info"
FIND = """
import importlib.metadata, json
found = [[group, p.name, p.value]
         for group in ("triton.backends", "vllm.general_plugins", "vllm.platform_plugins")
         for p in importlib.metadata.entry_points(group=group)]
print(json.dumps([importlib.metadata.version("mtppp-plugins"), sorted(found)]))
"""


def written(made: PluginBundle, directory: Path) -> Path:
    for path, data in made.files.items():
        file = directory / made.name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return directory / made.name


def on_the_path(directory: Path, script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        env={"PYTHONPATH": str(directory)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    ("packages", "points"),
    [
        (
            ["mtppp_patches"],
            [["vllm.general_plugins", "mtppp_patches", "mtppp_patches.plugin:register"]],
        ),
        (
            ["mtppp_patches", "mtppp_cpu"],
            [
                ["triton.backends", "cpu", "mtppp_cpu.triton_backend"],
                ["vllm.general_plugins", "mtppp_cpu", "mtppp_cpu.gaps:register"],
                ["vllm.general_plugins", "mtppp_patches", "mtppp_patches.plugin:register"],
                ["vllm.platform_plugins", "mtppp_cpu", "mtppp_cpu.platform_plugin:platform"],
            ],
        ),
    ],
)
def test_a_python_with_the_directory_on_its_path_finds_the_entry_points(
    tmp_path: Path, packages: list[str], points: list[list[str]]
) -> None:
    directory = written(bundle(packages), tmp_path)
    assert json.loads(on_the_path(directory, FIND)) == [__version__, points]


def test_the_plugin_is_imported_from_there_with_the_standard_library_alone(tmp_path: Path) -> None:
    directory = written(bundle(["mtppp_patches"]), tmp_path)
    script = (
        "from mtppp_patches import plugin, support;"
        "support.support(); plugin.register(); print(plugin.__file__)"
    )
    assert on_the_path(directory, script) == f"{directory}/mtppp_patches/plugin.py\n"


def test_the_files_that_say_what_it_is() -> None:
    files = bundle(["mtppp_patches", "mtppp_cpu"]).files
    assert files[f"{DIST_INFO}/METADATA"].decode() == (
        f"Metadata-Version: 2.1\nName: mtppp-plugins\nVersion: {__version__}\n"
    )
    assert files[f"{DIST_INFO}/entry_points.txt"].decode() == (
        "[triton.backends]\n"
        "cpu = mtppp_cpu.triton_backend\n"
        "\n"
        "[vllm.general_plugins]\n"
        "mtppp_patches = mtppp_patches.plugin:register\n"
        "mtppp_cpu = mtppp_cpu.gaps:register\n"
        "\n"
        "[vllm.platform_plugins]\n"
        "mtppp_cpu = mtppp_cpu.platform_plugin:platform\n"
    )


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of a test's own that can be bundled."""
    root = tmp_path / "path" / "mtppp_probe"
    (root / "inner").mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "entry_points.py").write_text('ENTRY_POINTS = {"group": {"name": "mtppp_probe:f"}}\n')
    (root / "data.json").write_text("{}")
    (root / "inner" / "code.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(str(root.parent))
    yield root
    for name in [name for name in sys.modules if name.partition(".")[0] == "mtppp_probe"]:
        del sys.modules[name]


def test_only_sources_and_data_are_shipped(package: Path) -> None:
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "code.cpython-311.pyc").write_bytes(b"x")
    (package / "notes.txt").write_text("x")
    assert sorted(bundle(["mtppp_probe"]).files) == [
        "mtppp_plugins-" + __version__ + ".dist-info/METADATA",
        "mtppp_plugins-" + __version__ + ".dist-info/entry_points.txt",
        "mtppp_probe/__init__.py",
        "mtppp_probe/data.json",
        "mtppp_probe/entry_points.py",
        "mtppp_probe/inner/code.py",
    ]


def test_the_name_follows_from_the_contents_and_nothing_else(package: Path) -> None:
    first = bundle(["mtppp_probe"])
    assert len(first.name) == 16
    assert bundle(["mtppp_probe"]) == first
    (package / "notes.txt").write_text("x")
    assert bundle(["mtppp_probe"]) == first

    names = {first.name}
    code = package / "inner" / "code.py"
    code.write_text("A = 2\n")
    names.add(bundle(["mtppp_probe"]).name)
    code.rename(package / "inner" / "renamed.py")
    names.add(bundle(["mtppp_probe"]).name)
    (package / "inner" / "empty.py").touch()
    names.add(bundle(["mtppp_probe"]).name)
    assert len(names) == 4


def test_what_stands_in_one_file_does_not_pass_for_two(package: Path) -> None:
    first, second = package / "a.py", package / "b.py"
    first.write_text("12")
    second.write_text("3")
    one = bundle(["mtppp_probe"]).name
    first.write_text("1")
    second.write_text("23")
    assert bundle(["mtppp_probe"]).name != one


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^no_such_package$"):
        bundle(["no_such_package"])
