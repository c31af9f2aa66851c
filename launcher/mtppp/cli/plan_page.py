"""A Plan as one HTML page: nothing in it comes from elsewhere, and the same Plan gives the same
bytes. Every text is escaped; shapes are inline SVG, colours follow the reader's light or dark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby

from mtppp.cli import plan_words as words
from mtppp.plan.plan import NodePlan, Stage
from mtppp.plan.review import Review

_COMPACT_FROM = 9
"""So many stages or more are drawn in low rows."""
_CODE_WIDTH = 100

_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1c2024; --faint: #60646c;
  --line: #d9d9e0; --panel: #f7f7f9; --dense: #8da4ef; --moe: #3e63dd; --mtp: #f76b15;
  --layers: #3e63dd; --other: #8da4ef; --cache: #30a46c; --kept: #e0e1e6; --bad: #ce2c31;
  --badpanel: #ffefef; --warn: #ab6400; --warnpanel: #fff7c2; --good: #218358; }
@media (prefers-color-scheme: dark) { :root { --page: #111113; --text: #edeef0; --faint: #b0b4ba;
  --line: #363a3f; --panel: #18191b; --dense: #435db1; --moe: #849dff; --mtp: #ffa057;
  --layers: #849dff; --other: #435db1; --cache: #3dd68c; --kept: #363a3f; --bad: #ff9592;
  --badpanel: #3b1219; --warn: #ffca16; --warnpanel: #302008; --good: #3dd68c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 3rem; max-width: 76rem; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p, ul { margin: .25rem 0; }
ul { padding-left: 1.2rem; }
li { margin: .2rem 0; overflow-wrap: anywhere; }
.faint { color: var(--faint); }
.finding { border-left: 4px solid var(--line); background: var(--panel); padding: .5rem .75rem;
  margin: .75rem 0; overflow-wrap: anywhere; }
.refused { border-color: var(--bad); background: var(--badpanel); }
.warning { border-color: var(--warn); background: var(--warnpanel); }
.refused b { color: var(--bad); } .warning b { color: var(--warn); }
.verdict { color: var(--good); font-weight: 600; }
.node { border: 1px solid var(--line); border-radius: 8px; margin: .5rem 0; overflow: hidden; }
.node > header { background: var(--panel); padding: .3rem .75rem; font-weight: 600;
  overflow-wrap: anywhere; }
.node > header span { font-weight: 400; color: var(--faint); }
.stage { display: grid; grid-template-columns: 9rem 9.5rem minmax(0, 1fr) minmax(0, 1fr);
  gap: .25rem 1rem; padding: .6rem .75rem; align-items: start; }
.stage + .stage { border-top: 1px solid var(--line); }
.stage small { display: block; color: var(--faint); }
.ranks { display: flex; flex-wrap: wrap; gap: 3px; align-content: start; }
.ranks i { font-style: normal; font-size: .72rem; line-height: 1.15rem; min-width: 1.9rem;
  text-align: center; border: 1px solid var(--line); border-radius: 3px; }
svg { display: block; width: 100%; height: 1.35rem; border-radius: 3px; }
.compact .node { margin: 0; border-radius: 0; border-bottom-width: 0; }
.compact .node:last-of-type { border-bottom-width: 1px; }
.compact .node > header { display: none; }
.roomy .where { display: none; }
.compact .stage { padding: .15rem .75rem; font-size: .85rem;
  grid-template-columns: 14rem 5.5rem minmax(0, 1fr) minmax(0, 1fr); }
.compact .ruler { grid-template-columns: 14rem 5.5rem minmax(0, 1fr) minmax(0, 1fr); }
.compact svg { height: .8rem; margin-top: .3rem; }
.compact .stage small { display: inline; }
.ruler { display: grid; grid-template-columns: 9rem 9.5rem minmax(0, 1fr) minmax(0, 1fr);
  gap: 0 1rem; padding: 0 .8rem; font-size: .8rem; color: var(--faint); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .85rem; margin: .5rem 0; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px;
  margin-right: .35rem; vertical-align: -1px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .9rem .2rem 0; white-space: pre;
  vertical-align: bottom; }
th { font-weight: 600; color: var(--faint); border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
details { margin: .3rem 0; } summary { cursor: pointer; overflow-wrap: anywhere; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; margin: .3rem 0;
  padding: .5rem .75rem; overflow-x: auto; font: 13px/1.45 ui-monospace, monospace; }
@media (max-width: 50rem) {
  .stage, .compact .stage { grid-template-columns: minmax(0, 1fr); gap: .3rem; }
  .ruler { display: none; } .compact .ranks { display: none; } }
"""


def page(review: Review) -> str:
    """The whole page."""
    plan = review.plan
    parts = [
        f"<h1>{escape(plan.name)}</h1>",
        f"<p>{escape(plan.model)} <span class=faint>({escape(plan.family)})</span>, "
        f"{escape(words.title(plan))}</p>",
        *_findings(review),
        *_drawing(review),
        *_list("Cut", review.cut.why),
        *_memory(review),
        *_list("Patches", words.patch_lines(review)),
        *_list("Set where the file says nothing", words.default_lines(review)),
        *_list("Left alone", words.withheld_lines(review)),
        *_environment(review),
        *_commands(review),
        *_list("Ports", words.port_lines(plan)),
        *_list("Time", words.time_lines(review)),
        *_list("Not known", review.unknowns),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(plan.name)}: plan</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _findings(review: Review) -> Iterator[str]:
    for refusal in review.refusals:
        yield _finding("refused", refusal.reason, refusal.way_out)
    if risk := words.override(review):
        yield f"<p class=faint>{escape(risk)}</p>"
    for placeholder in review.placeholders:
        yield _finding("refused", f"not filled in: {placeholder}", "set it in the file")
    if not (review.refusals or review.placeholders):
        yield "<p class=verdict>Nothing in the file speaks against a launch.</p>"
    for warning in review.warnings:
        yield _finding("warning", warning.message, warning.way_out)


def _finding(kind: str, message: str, way_out: str) -> str:
    way = f"<br><span>Way out: {escape(way_out)}</span>" if way_out else ""
    return f'<div class="finding {kind}"><b>{kind.capitalize()}:</b> {escape(message)}{way}</div>'


def _drawing(review: Review) -> Iterator[str]:
    plan = review.plan
    is_compact = len(plan.stages) >= _COMPACT_FROM
    yield "<h2>Stages</h2>"
    yield f'<div class="{"compact" if is_compact else "roomy"}">'
    has_memory = any(words.memory_spans(review, stage) for stage in plan.stages)
    memory = "memory of each GPU" if has_memory else ""
    yield (
        "<div class=ruler><span>stage</span><span>ranks</span>"
        f"<span>layers 0 to {sum(plan.layer_partition) - 1}</span><span>{memory}</span></div>"
    )
    for nodes, stages in groupby(plan.stages, key=lambda stage: stage.nodes):
        named = ", ".join(
            f"{escape(plan.nodes[index].host)} <span>{escape(plan.nodes[index].address)}</span>"
            for index in nodes
        )
        rows = "".join(_stage(review, stage, is_compact) for stage in stages)
        yield f"<section class=node><header>{named}</header>{rows}</section>"
    yield "</div>"
    yield _legend(review, has_memory)


def _stage(review: Review, stage: Stage, is_compact: bool) -> str:
    plan = review.plan
    ranks = words.ranks_of(plan, stage)
    boxes = (
        escape(words.ranges(ranks)) if is_compact else "".join(f"<i>{rank}</i>" for rank in ranks)
    )
    role = words.roles(plan, stage)
    where = escape(", ".join(plan.nodes[index].host for index in stage.nodes))
    return (
        f"<div class=stage><div>stage {stage.index} "
        f'<small><span class="where">{where}</span> {escape(role)}</small></div>'
        f"<div class=ranks>{boxes}</div>"
        f"<div>{_layers(review, stage)}{_under(words.layers_of(stage), is_compact)}</div>"
        f"<div>{_gpu(review, stage, is_compact)}</div></div>"
    )


def _under(text: str, is_compact: bool) -> str:
    return "" if is_compact else f"<small>{escape(text)}</small>"


def _layers(review: Review, stage: Stage) -> str:
    """All layers as one line; this stage's are filled, at their place."""
    plan = review.plan
    total = sum(plan.layer_partition)
    width = total + bool(plan.draft_tokens)
    gap = min(1.0, width / 80)
    kinds = words.kinds_of(review, stage)
    count = stage.last_layer - stage.first_layer + 1
    cells = [
        _cell(stage.first_layer + offset, gap, kind or "moe", f"layer {stage.first_layer + offset}")
        for offset, kind in enumerate(kinds or [""] * count)
    ]
    if stage.drafter:
        cells.append(_cell(total, gap, "mtp", "drafter (MTP)"))
    label = escape(f"{words.layers_of(stage)} of {total}")
    return (
        f'<svg viewBox="0 0 {width * 10} 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{label}"><rect width="{width * 10}" height="10" fill="var(--kept)"/>'
        + "".join(cells)
        + "</svg>"
    )


def _cell(place: int, gap: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{place * 10}" width="{10 - gap:g}" height="10" fill="var(--{colour})">'
        f"<title>{escape(title)}</title></rect>"
    )


def _gpu(review: Review, stage: Stage, is_compact: bool) -> str:
    """One GPU's memory, to scale."""
    spans = words.memory_spans(review, stage)
    if spans is None:
        return ""
    parts = {"layers": spans.layers, "other": spans.other, "cache": spans.cache, "kept": spans.kept}
    shapes, at = [], 0.0
    for colour, size in parts.items():
        width = 1000 * size / spans.total
        shapes.append(
            f'<rect x="{at:.1f}" width="{width:.1f}" height="10" fill="var(--{colour})"/>'
        )
        at += width
    label = words.memory_label(review, stage, spans)
    return (
        f'<svg viewBox="0 0 1000 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}"><title>{escape(label)}</title>{"".join(shapes)}</svg>'
        + ("" if is_compact else f"<small>{escape(label)}</small>")
    )


def _legend(review: Review, has_memory: bool) -> str:
    layers = []
    if review.model.stack is not None:
        layers += [("dense", "dense"), ("moe", "mixture of experts")]
    if review.plan.draft_tokens:
        layers.append(("mtp", "drafter (MTP)"))
    memory = [
        ("layers", "layers"),
        ("other", "other weights, buffers"),
        ("cache", "KV cache"),
        ("kept", "not used"),
    ]
    return _key("Layers", layers) + _key("Memory", memory if has_memory else [])


def _key(what: str, entries: Sequence[tuple[str, str]]) -> str:
    shown = "".join(
        f'<span><i style="background:var(--{colour})"></i>{text}</span>' for colour, text in entries
    )
    return f"<div class=legend>{what}: {shown}</div>" if entries else ""


def _memory(review: Review) -> Iterator[str]:
    if review.memory is None:
        return
    yield f"<h2>{words.memory_title(review)}</h2>"
    heads = "".join(f"<th>{escape(column)}</th>" for column in words.memory_columns(review))
    rows = "".join(f"<tr>{_cells(row)}</tr>" for row in words.memory_rows(review))
    yield f"<div class=wide><table><tr>{heads}</tr>{rows}</table></div>"
    yield _items(words.memory_notes(review))
    parts = [f"stage {stage.index}: {words.memory_parts(stage)}" for stage in review.memory.stages]
    yield f"<details><summary>What lies there</summary>{_items(parts)}</details>"


def _cells(row: Sequence[str]) -> str:
    return "".join(f"<td>{escape(cell)}</td>" for cell in row)


def _environment(review: Review) -> Iterator[str]:
    plan = review.plan
    common = words.common_environment(plan)
    yield "<h2>Environment</h2>"
    yield _code("every process, on every node", _variables(common))
    for node in plan.nodes:
        if own := words.own_environment(node, common):
            yield _code(node.host, _variables(own))
    yield _code("placement and server also", _variables(words.server_environment(plan)))
    if plan.secrets:
        names = escape(", ".join(plan.secrets))
        yield f"<p>Taken from your environment at a launch: {names}</p>"


def _variables(environment: words.Environment) -> list[str]:
    return [words.variable(name, value) for name, value in environment.items()]


def _commands(review: Review) -> Iterator[str]:
    plan = review.plan
    yield "<h2>Commands, in this order</h2>"
    steps: list[tuple[NodePlan, str, Sequence[str]]] = [
        *((node, node.ray.role, node.ray.argv) for node in plan.nodes),
        (plan.head, plan.placement.role, plan.placement.argv),
        (plan.head, plan.server.role, plan.server.argv),
    ]
    for node, role, argv in steps:
        yield _code(f"{node.host}: {role}", words.folded(argv, _CODE_WIDTH))


def _code(summary: str, lines: Iterable[str]) -> str:
    text = escape("\n".join(lines))
    return f"<details><summary>{escape(summary)}</summary><pre>{text}</pre></details>"


def _list(heading: str, lines: Iterable[str]) -> Iterator[str]:
    shown = list(lines)
    if shown:
        yield f"<h2>{heading}</h2>"
        yield _items(shown)


def _items(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
