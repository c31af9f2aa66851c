"""What the tests of imports share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mtppp.cluster import Cluster
from mtppp.importer.draft import Draft

RECIPE = Path(__file__).parents[2] / "data/glm-5.2-recipe.yaml"


@dataclass(frozen=True)
class Imported:
    """What came of an import: the file, and the cluster that its text loads as."""

    draft: Draft
    cluster: Cluster

    def said(self, kind: str) -> list[str]:
        """What the notes of a kind are about."""
        return [note.about for note in self.draft.notes if note.kind == kind]

    def message(self, about: str) -> str:
        return next(note.message for note in self.draft.notes if note.about == about)


Import = Callable[..., Imported]
"""`imported(text, nodes=..., facts=..., gpu=...)`: find, translate, judge, load."""
