from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_reference_pages_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location(
        "generate_docs", ROOT / "scripts/generate_docs.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for path, text in module.pages().items():
        assert path.read_text(encoding="utf-8") == text, "run scripts/generate_docs.py"
