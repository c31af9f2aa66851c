from __future__ import annotations

from pathlib import Path

import pytest

from mtppp_patches.fingerprint import SourceNotFoundError, fingerprint, fingerprint_file


def of(tmp_path: Path, source: str, attribute: str) -> str:
    (tmp_path / "module.py").write_text(source)
    return fingerprint(tmp_path, "package.module", attribute)


PLAIN = "class A:\n    @property\n    def f(self, n: int = 1):\n        return n + 1\n"


@pytest.mark.parametrize(
    "same",
    [
        "class A:\n    @property\n    def f(self, n: int=1):  # why\n\n        return (n + 1)\n",
        'class A:\n    "doc"\n    @property\n    def f(self, n: int = 1):\n        """Doc."""\n'
        "        return n + 1\n",
        "import os\n\nclass B: pass\n\n" + PLAIN + "\n    def other(self): ...\n",
        "if True:\n" + "".join(f"    {line}\n" for line in PLAIN.splitlines()),
        "try:\n    import x\nexcept ImportError:\n"
        + "".join(f"    {line}\n" for line in PLAIN.splitlines()),
    ],
)
def test_notation_makes_no_difference(tmp_path: Path, same: str) -> None:
    assert of(tmp_path, same, "A.f") == of(tmp_path, PLAIN, "A.f")


@pytest.mark.parametrize(
    ("old", "new"),
    [("n + 1", "n - 1"), ("= 1", "= 2"), ("    @property\n", ""), ("return n", "return +n")],
)
def test_meaning_makes_one(tmp_path: Path, old: str, new: str) -> None:
    assert of(tmp_path, PLAIN.replace(old, new), "A.f") != of(tmp_path, PLAIN, "A.f")


def test_all_definitions_of_a_name_count(tmp_path: Path) -> None:
    setter = PLAIN + "    @f.setter\n    def f(self, n):\n        pass\n"
    assert of(tmp_path, setter, "A.f") != of(tmp_path, PLAIN, "A.f")


def test_assigned_names_and_packages(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "__init__.py").write_text("LIMIT: int = 3\n")
    assert fingerprint(tmp_path, "package.sub", "LIMIT")


@pytest.mark.parametrize("attribute", ["A.g", "B.f", "g"])
def test_what_is_not_defined_is_not_found(tmp_path: Path, attribute: str) -> None:
    with pytest.raises(SourceNotFoundError, match="defines no"):
        of(tmp_path, PLAIN, attribute)


def test_a_whole_file(tmp_path: Path) -> None:
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_text('"""Doc."""\nX = 1\n')
    second.write_text("X = 1  # why\n")
    assert fingerprint_file(first) == fingerprint_file(second)
    second.write_text("X = 2\n")
    assert fingerprint_file(first) != fingerprint_file(second)


def test_a_module_without_source_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError, match="no source"):
        fingerprint(tmp_path, "package.compiled", "A")


def test_the_value_does_not_depend_on_the_interpreter(tmp_path: Path) -> None:
    # Recorded with Python 3.11. A parser that yields another value must not pass unnoticed.
    source = (
        "class A:\n"
        '    def f(self, *a: int, k: str = "x", **b):\n'
        '        return f"{k}-{a!r:>{len(a)}}"\n'
    )
    assert of(tmp_path, source, "A.f") == (
        "ff981ab26b9d31a62621979d419e84a9bd92dcfbe0d8860774afa6520b4486ed"
    )
