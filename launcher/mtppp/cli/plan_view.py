"""A Plan in the terminal: readable without colour, at 80 columns and wider."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from mtppp.cli import plan_words as words
from mtppp.plan.plan import Command, NodePlan, Stage
from mtppp.plan.review import Review

_DETAILED = 4
"""Up to so many stages, the parts of each are listed."""


def view(
    review: Review, host_problems: Sequence[str], *, width: int, ascii_only: bool
) -> Iterator[Text | Table]:
    """All parts, in the order a person wants them; what stops a launch comes last, in sight.

    Args:
        host_problems: what on the hosts is not as the file needs it.
        width: columns of the terminal.
        ascii_only: it has no block characters.
    """
    yield from _View(review, width, "#+=." if ascii_only else "█▓░·").parts(host_problems)


class _View:
    def __init__(self, review: Review, width: int, marks: str) -> None:
        self._review = review
        self._plan = review.plan
        self._width = width
        self._marks = marks

    def parts(self, host_problems: Sequence[str]) -> Iterator[Text | Table]:
        review, plan = self._review, self._plan
        yield Text(f"{plan.name}: {plan.model} ({plan.family})", style="bold")
        yield Text(words.title(plan))
        yield from self._stages()
        yield from self._section("Cut", review.cut.why)
        yield from self._memory()
        yield from self._section("Patches", words.patch_lines(review))
        yield from self._section("Set where the file says nothing", words.default_lines(review))
        yield from self._section("Left alone", words.withheld_lines(review))
        yield from self._environment()
        yield from self._commands()
        yield from self._section("Ports", words.port_lines(plan))
        yield from self._section("Time", words.time_lines(review))
        yield from self._section("Not known", review.unknowns)
        for warning in review.warnings:
            yield from self._finding("warning", "yellow", warning.message, warning.way_out)
        for placeholder in review.placeholders:
            yield from self._finding("fill in", "red", placeholder, "")
        for problem in host_problems:
            yield from self._finding("host", "red", problem, "")
        for refusal in review.refusals:
            yield from self._finding("refused", "bold red", refusal.reason, refusal.way_out)
        if risk := words.override(review):
            yield from self._finding("", "", risk, "")
        if not (review.refusals or host_problems or review.placeholders):
            yield Text("\nNothing speaks against a launch.", style="green")

    def _section(self, name: str, lines: Iterable[str]) -> Iterator[Text]:
        shown = list(lines)
        if shown:
            yield Text(f"\n{name}", style="bold")
            for line in shown:
                yield self._line(line)

    def _line(self, line: str, left: int = 2, style: str = "") -> Text:
        """A line, folded between words below its own indent; a long word stays whole."""
        indent = " " * left
        folded = textwrap.fill(
            line,
            self._width,
            initial_indent=indent,
            subsequent_indent=indent + "  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        return Text(folded, style=style)

    def _finding(self, kind: str, style: str, message: str, way_out: str) -> Iterator[Text]:
        lines = [message, *([f"way out: {way_out}"] if way_out else [])]
        first = True
        for line in lines:
            label = f"{kind + ':' if kind and first else '':<9}"
            folded = textwrap.fill(
                line,
                self._width,
                initial_indent=label,
                subsequent_indent=" " * len(label),
                break_on_hyphens=False,
            )
            text = Text("\n" if first else "").append(folded)
            if kind and first:
                text.stylize(style, 1, 1 + len(kind) + 1)
            yield text
            first = False

    def _stages(self) -> Iterator[Text]:
        review, plan = self._review, self._plan
        yield Text("\nStages", style="bold")
        number = len(str(len(plan.stages) - 1))
        left = number + 4
        for stage in plan.stages:
            yield self._line(self._stage(stage, number))
            kinds = "".join("M" if kind == "moe" else "d" for kind in words.kinds_of(review, stage))
            for start in range(0, len(kinds), self._width - left):
                part = kinds[start : start + self._width - left]
                yield Text(" " * left + part, style="cyan")
            if bar := self._bar(stage):
                yield Text(" " * left).append(bar, style="green")
        legend = []
        if review.model.stack is not None:
            legend.append("d dense, M mixture of experts")
        if any(gpu is not None for gpu in review.gpus) and review.memory is not None:
            names = ("layers", "other weights, buffers", "KV cache", "not used")
            pairs = zip(self._marks, names, strict=True)
            legend.append("  ".join(f"{mark} {name}" for mark, name in pairs))
        for line in legend:
            yield Text(" " * left + line, style="dim")

    def _stage(self, stage: Stage, number: int) -> str:
        plan = self._plan
        hosts = ", ".join(f"{plan.nodes[i].host} ({plan.nodes[i].address})" for i in stage.nodes)
        parts = [
            f"{stage.index:>{number}}",
            hosts,
            words.numbered("rank", words.ranks_of(plan, stage)),
            words.layers_of(stage),
            words.roles(plan, stage),
        ]
        return "  ".join(part for part in parts if part)

    def _bar(self, stage: Stage) -> str:
        """One GPU's memory, to scale."""
        spans = words.memory_spans(self._review, stage)
        if spans is None:
            return ""
        cells = min(60, self._width - 20) if spans.total <= spans.gpu else 30
        bar, end = "", 0
        for mark, part in zip(
            self._marks, (spans.layers, spans.other, spans.cache, spans.kept), strict=True
        ):
            end += part
            bar += mark * (round(cells * end / spans.total) - len(bar))
        return f"{bar} {spans.label}"

    def _memory(self) -> Iterator[Text | Table]:
        review = self._review
        if review.memory is None:
            return
        yield Text(f"\n{words.memory_title(review)}", style="bold")
        table = Table(box=None, padding=(0, 0, 0, 2), pad_edge=True)
        for index, column in enumerate(words.memory_columns(review)):
            justify = "left" if index == 0 else "right"
            table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        for row in words.memory_rows(review):
            table.add_row(*row)
        yield table
        if len(review.memory.stages) <= _DETAILED:
            for stage in review.memory.stages:
                yield self._line(f"stage {stage.index}: {words.memory_parts(stage)}")
        for note in words.memory_notes(review):
            yield self._line(note)

    def _environment(self) -> Iterator[Text]:
        plan = self._plan
        common = words.common_environment(plan)
        yield Text("\nEnvironment of every process, on every node", style="bold")
        yield from self._variables(common, 2)
        for node in plan.nodes:
            own = words.own_environment(node, common)
            if own and node.index <= 1:
                yield self._line(f"on {node.host}:")
                yield from self._variables(own, 4)
            elif own:
                variables = " ".join(words.variable(*item) for item in own.items())
                yield self._line(f"on {node.host}: {variables}")
        yield self._line("for placement and server also:")
        yield from self._variables(words.server_environment(plan), 4)
        if plan.secrets:
            names = ", ".join(plan.secrets)
            yield self._line(f"taken from your environment at a launch: {names}")

    def _variables(self, environment: Mapping[str, str], left: int) -> Iterator[Text]:
        for name, value in environment.items():
            yield Text(" " * left + words.variable(name, value))

    def _commands(self) -> Iterator[Text]:
        plan = self._plan
        yield Text("\nCommands, in this order", style="bold")
        for node in plan.nodes:
            if node.index <= 1:
                yield from self._command(node, node.ray)
            else:
                like = plan.nodes[1]
                own = words.own_arguments(node, like)
                yield self._line(f"{node.host}: ray as on {like.host}, but {own}")
        yield from self._command(plan.head, plan.placement)
        yield from self._command(plan.head, plan.server)

    def _command(self, node: NodePlan, command: Command) -> Iterator[Text]:
        yield self._line(f"{node.host}: {command.role} (log {node.directory}/{command.log})")
        for line in words.folded(command.argv, self._width - 4):
            yield Text(f"    {line}")
