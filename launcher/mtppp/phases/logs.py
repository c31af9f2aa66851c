"""The lines of a log that matter to whoever asks why it failed."""

from __future__ import annotations

import re

_TELLING = re.compile(
    r"\b(?:\w*Error|\w*Exception|ERROR|CRITICAL|FATAL|panicked|Killed|out of memory)\b|\berror:",
)
# Says that a peer is slow, which is so during every load; it ends nothing.
_HARMLESS = re.compile(r"No available shared memory broadcast block")
# Frames and decorations say where, not what.
_FRAME = re.compile(r'^\s*(?:File "|\^+\s*$|~+)|Traceback \(most recent call last\)')
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def telling_lines(text: str, count: int) -> list[str]:
    """At most `count` lines that speak of an error, in order and each once; else the last lines.

    The first error and the last ones: the first is often the cause, the last what ended it.
    """
    lines = [_ESCAPES.sub("", line).rstrip()[:300] for line in text.splitlines() if line.strip()]
    errors = list(
        dict.fromkeys(
            line
            for line in lines
            if _TELLING.search(line) and not _HARMLESS.search(line) and not _FRAME.search(line)
        )
    )
    if not errors:
        return lines[-count:]
    if len(errors) <= count:
        return errors
    return [errors[0], *errors[len(errors) - count + 1 :]]


# What vLLM (0.27 to 0.33) says on its way up, in the order in which it does.
_STAGES = (
    (re.compile(r"Initializing a V1 LLM engine"), "engine starts"),
    (re.compile(r"Using the existing placement group"), "workers start"),
    (re.compile(r"(\d+)% Completed \| (\d+)/(\d+)"), r"weights: \2 of \3 files"),
    (re.compile(r"Loading weights took ([\d.]+)"), r"weights loaded in \1 s"),
    (re.compile(r"KV cache size: ([\d,]+) tokens"), r"KV cache: \1 tokens"),
    (re.compile(r"[Ww]arming up"), "warming up"),
    (re.compile(r"Capturing CUDA graph"), "capturing CUDA graphs"),
    (re.compile(r"init engine .* took ([\d.]+)"), r"engine ready after \1 s"),
    (re.compile(r"Application startup complete"), "server is up"),
)


def stage_of_start(log: str) -> str:
    """How far a server has come, from its log; "" when it has said nothing of it yet."""
    latest, text = -1, ""
    for pattern, shown in _STAGES:
        for match in pattern.finditer(log):
            if match.start() > latest:
                latest, text = match.start(), match.expand(shown)
    return text
