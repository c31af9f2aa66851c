"""Identifies a piece of Python source by what it does, not by how it is written down.

Sources are read as files and never imported: the launcher's host has no vLLM, and importing a
model's module in the wrong process has side effects.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

# Where a name is used (Load, Store) follows from the tree; the rest is notation.
_NOTATION = frozenset({"ctx", "kind", "type_comment", "type_ignores"})

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_Documented = _Definition | ast.Module


class SourceNotFoundError(LookupError):
    """The module has no source file, or the attribute is not defined in it."""


def fingerprint(package_root: Path, module: str, attribute: str) -> str:
    """SHA-256 of the definition of `attribute` in `module`.

    Comments, docstrings, layout and the version of Python that parses make no difference;
    decorators, signature, annotations and body do. A name defined several times in its scope (a
    property and its setter, alternatives under `if`) is taken as all its definitions in order.

    Args:
        package_root: the directory of the top-level package, such as site-packages/vllm.
        module: dotted name, beginning with the package's: "vllm.v1.worker.gpu.pp_utils".
        attribute: a function, class, method or assigned name: "PPHandler.receive".

    Raises:
        SourceNotFoundError: no such file or definition.
    """
    path = source_path(package_root, module)
    try:
        tree = ast.parse(path.read_bytes())
    except OSError as error:
        raise SourceNotFoundError(f"{module}: no source at {path}") from error
    scope: list[ast.stmt] = tree.body
    *owners, name = attribute.split(".")
    for owner in owners:
        scope = [
            statement
            for node in _defining(scope, owner)
            if isinstance(node, ast.ClassDef)
            for statement in node.body
        ]
    found = list(_defining(scope, name))
    if not found:
        raise SourceNotFoundError(f"{module} defines no {attribute} ({path})")
    text = "\n".join(_normal(node) for node in found)
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint_file(path: Path) -> str:
    """SHA-256 of a whole source file, of what it does as above."""
    module = ast.parse(path.read_bytes())
    return hashlib.sha256(_normal(module).encode()).hexdigest()


def source_path(package_root: Path, module: str) -> Path:
    """The file of `module`, a package's being its `__init__.py`."""
    stem = package_root.joinpath(*module.split(".")[1:])
    return stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")


def _defining(body: list[ast.stmt], name: str) -> Iterator[ast.stmt]:
    """Statements of one scope that define `name`, also those under if, try and with."""
    for node in body:
        if isinstance(node, _Definition):
            if node.name == name:
                yield node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                yield node
        else:
            for field in ("body", "orelse", "handlers", "finalbody"):
                inner = getattr(node, field, [])
                for block in inner:
                    if isinstance(block, ast.ExceptHandler):
                        yield from _defining(block.body, name)
                    elif isinstance(block, ast.stmt):
                        yield from _defining([block], name)


def _normal(node: object) -> str:
    if isinstance(node, list):
        return "[" + ",".join(map(_normal, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    documented = isinstance(node, _Documented) and ast.get_docstring(node, clean=False) is not None
    fields = []
    for field, value in ast.iter_fields(node):
        # Python 3.12 and 3.13 added fields that are empty in older code: empty says nothing.
        if field in _NOTATION or value is None or value == []:
            continue
        kept = value[1:] if documented and field == "body" else value
        fields.append(f"{field}={_normal(kept)}")
    return f"{type(node).__name__}({','.join(fields)})"
