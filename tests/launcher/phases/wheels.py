"""Tiny wheels, and locks of them."""

from __future__ import annotations

import hashlib
import platform
import zipfile
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

PYTHON = ".".join(platform.python_version_tuple()[:2])


def build_wheel(directory: Path, name: str, version: str, content: str = "") -> str:
    """Put a wheel with one module there; its hash."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    path = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for at, text in files.items():
            wheel.writestr(at, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def lock_text(hashes: Mapping[str, str], *, pythons: str = PYTHON, size: int = 1000) -> str:
    """A lock of its own digest: `hashes` of what, such as "vllm==0.32.0"."""
    lines = [f"# {uuid4().hex}", f"# pythons: {pythons}", f"# bytes: {size}"]
    for what, digest in hashes.items():
        lines += [f"{what} \\", f"    --hash=sha256:{digest}"]
    return "\n".join(lines) + "\n"
