"""Which strategies of a recipe start as they are, which need changes, and which cannot be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mtppp.errors import MtpppError
from mtppp.importer.commands import find_commands
from mtppp.importer.draft import Draft, Note
from mtppp.importer.judge import default_release, judge, release_of
from mtppp.importer.recipe import NONE, STRATEGIES, Choice, Recipe, recipe_command
from mtppp.importer.translate import translate
from mtppp.importer.wishes import Wishes
from mtppp.model.facts import ModelFacts

Outcome = Literal["as is", "with changes", "not today", "cannot", "not judged"]
"""The command serves, and right; it does once changed as said; it would, but `mtppp launch` refuses
it until it is proven; there is no such deployment; the model is not known here."""

_WEIGHTY = ("refused", "changed", "needs")


@dataclass(frozen=True, slots=True)
class Checked:
    """One strategy with one way to speculate.

    Attributes:
        reasons: what is changed or needed, or why it cannot be, the most important first.
    """

    strategy: str
    speculation: str
    command: str
    outcome: Outcome
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_strategies(
    recipe: Recipe, facts: ModelFacts | None, choice: Choice
) -> tuple[Checked, ...]:
    """Every strategy of the recipe, without speculation and with each of its modes.

    The release is the oldest that the recipe allows, which is what its page installs.

    Args:
        facts: of the variant's model; None where they could not be had.
        choice: GPUs, nodes and variant; strategy and speculation are each tried.
    """
    return tuple(_check_all(recipe, facts, choice))


def _check_all(recipe: Recipe, facts: ModelFacts | None, choice: Choice) -> Iterator[Checked]:
    for strategy in recipe.strategies:
        if strategy not in STRATEGIES:
            yield Checked(strategy, NONE, "", "cannot", ("mtppp does not know this strategy",))
            continue
        for mode in (NONE, *recipe.modes):
            tried = Choice(
                strategy=strategy,
                gpu=choice.gpu,
                gpus=choice.gpus,
                nodes=choice.nodes,
                variant=choice.variant,
                speculation=mode,
            )
            yield _check(recipe, facts, tried)


def _check(recipe: Recipe, facts: ModelFacts | None, choice: Choice) -> Checked:
    command = ""
    try:
        command = recipe_command(recipe, choice)
        draft = draft_of(recipe, choice, command)
        judge(draft, facts, Path("cluster.yaml"))
    except MtpppError as error:
        reasons = (error.message, *error.details)
        hint = (f"instead: {error.hint}",) if error.hint else ()
        return Checked(choice.strategy, choice.speculation, command, "cannot", (*reasons, *hint))
    notes = [note for note in draft.sorted_notes() if note.kind in _WEIGHTY]
    return Checked(
        choice.strategy,
        choice.speculation,
        command,
        "not judged" if facts is None else _outcome(notes),
        tuple(f"{note.about}: {note.message}" for note in notes),
    )


def draft_of(recipe: Recipe, choice: Choice, command: str, wishes: Wishes | None = None) -> Draft:
    """The draft of a recipe's command; the recipe's oldest release where nobody says one."""
    several = STRATEGIES[choice.strategy].several
    nodes = tuple(f"node-{index + 1}" for index in range(choice.nodes if several else 1))
    wishes = wishes or Wishes()
    wishes = replace(wishes, nodes=wishes.nodes or nodes, gpu_type=choice.gpu)
    found = find_commands(command, given={"HEAD_IP": "192.0.2.1"})
    release = release_of(recipe.minimum_release) if recipe.minimum_release else None
    draft = translate(
        found.serve, wishes, default_release=release or default_release(), base=Path()
    )
    if release and draft.release_from == "default":
        draft.release_from = "image"
    return draft


def _outcome(notes: Sequence[Note]) -> Outcome:
    kinds = {note.kind for note in notes}
    if "refused" in kinds:
        return "not today"
    return "with changes" if kinds else "as is"
