"""The lines of a log that matter to whoever asks why it failed."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TELLING = re.compile(
    r"\b(?:\w*Error|\w*Exception|ERROR|CRITICAL|FATAL|panicked|Killed|out of memory)\b|\berror:",
)
_HARMLESS = re.compile(
    # Says that a peer is slow, which is so during every load.
    r"No available shared memory broadcast block"
    # Names an OSError that has not happened; a start that takes a while goes without metrics.
    r"|Found ulimit of|Failed to establish connection to the metrics exporter"
    # Of a shutdown that ends ranks which have ended; and what stands between two exceptions.
    r"|Failed to kill actor|ActorHandleNotFoundError|The above exception was the direct cause"
)
"""What speaks of an error and has ended nothing."""
_SHOWN = 300  # characters of a line
_LATEST = 20  # lines
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
# "(RayWorkerProc pid=7, ip=10.0.0.2) (Worker_PP1 pid=7) ERROR 11-29 14:31:01 [core.py:15] message"
_LINE = re.compile(
    r"(?P<process>(?:\([^()]*\bpid=\d+[^()]*\) ?)*)"
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?"
    r"(?P<message>.*?)(?: \[repeated \d+x across cluster\].*)?"
)


def telling_lines(text: str, count: int) -> list[str]:
    """At most `count` lines that speak of an error, in order and each once; else the last lines.

    The first error and the last ones: the first is often the cause, the last what ended it. Of a
    traceback, only the exception.
    """
    return error_lines(text, count) or [line[:_SHOWN] for line in _lines(text)[-count:]]


def error_lines(text: str, count: int) -> list[str]:
    """The same, but nothing where no line speaks of an error."""
    told = _errors(_lines(text))
    if len(told) > count:
        told = [told[0], *told[len(told) - count + 1 :]]
    return [line[:_SHOWN] for line in told]


def latest_words(text: str) -> list[str]:
    """The last lines, without those that come again and again while nothing happens.

    Two that differ are progress; that a log grows is none.
    """
    return [line for line in _lines(text) if not _HARMLESS.search(line)][-_LATEST:]


def _lines(text: str) -> list[str]:
    return [line for raw in text.splitlines() if (line := _ESCAPES.sub("", raw).rstrip())]


def _errors(lines: list[str]) -> list[str]:
    found: dict[str, str] = {}
    # Several processes write to one log, in the middle of each other's tracebacks.
    in_traceback: set[str] = set()
    in_error: set[str] = set()
    for line in lines:
        matched = _LINE.fullmatch(line)
        assert matched is not None
        process, message = matched["process"], matched["message"]
        if message.startswith("\t"):  # Ray's table of an actor
            continue
        indented = message.startswith("  ")
        if message.startswith(("Traceback (most recent call last)", '  File "')):
            in_traceback.add(process)
            continue
        if indented and process in in_traceback:
            continue
        # The exception, or a further line of one; else what names an error.
        telling = process in in_traceback or (indented and process in in_error)
        telling = (telling or bool(_TELLING.search(line))) and not _HARMLESS.search(line)
        if "RayTaskError(" not in message:  # behind which stands the traceback of a rank
            in_traceback.discard(process)
        (in_error.add if telling else in_error.discard)(process)
        if telling and message:
            found.setdefault(message, line)
    return list(found.values())


# Of a rank's process that was killed or crashed: Ray and vLLM by the rank's number, or Ray by its
# process; of what a rank raised, Ray. In this order: others raise because one has gone.
_FAILED_RANKS = (
    re.compile(
        r"ActorDiedError: The actor died unexpectedly[^\n]*\n(?:[^\n]*\t\w+: [^\n]*\n)*?"
        r"[^\n]*\tname: vllm_Worker_[^\s_]+(?:_TP(?P<tensor>\d+))?(?:_PP(?P<stage>\d+))?"
    ),
    re.compile(r"RayWorkerProc rank=\[(?P<rank>\d+)"),
    re.compile(
        r"A worker died or was killed [^\n]*"
        r"Worker IP address: (?P<address>\S+)[^\n]* Worker PID: (?P<process>\d+)"
    ),
    re.compile(
        r"(?P<raised>ray)::RayWorkerProc\.\w+\(\)\S* "
        r"\(pid=(?P<process>\d+), ip=(?P<address>[^,\s)]+)"
    ),
)


@dataclass(frozen=True, slots=True)
class FailedRank:
    """A rank that failed, as the server's log tells it.

    Attributes:
        raised: whether it raised an exception; its process was killed, or crashed, where not.
        rank: None where only its process is told.
        address, process: its node's, and its number there; "" where its rank is told.
    """

    raised: bool
    rank: int | None
    address: str = ""
    process: str = ""


def failed_rank(log: str, tensor: int) -> FailedRank | None:
    """The rank whose failure is the cause of the others', by the server's log, if it tells of one.

    Args:
        tensor: ranks of one stage.
    """
    found = next((match for pattern in _FAILED_RANKS if (match := pattern.search(log))), None)
    if found is None:
        return None
    told = found.groupdict(default="")
    if "process" in told:
        return FailedRank("raised" in told, None, told["address"], told["process"])
    if "rank" in told:
        return FailedRank(False, int(told["rank"]))
    return FailedRank(False, int(told["stage"] or 0) * tensor + int(told["tensor"] or 0))


# What vLLM (0.27 to 0.33) says on its way up, in the order in which it does.
_STAGES = (
    (re.compile(r"Initializing a V1 LLM engine"), "engine starts"),
    (re.compile(r"Using the existing placement group"), "workers start"),
    (re.compile(r"% Completed \| "), ""),
    (re.compile(r"Loading weights took ([\d.]+)"), r"weights loaded in \1 s"),
    (re.compile(r"KV cache size: ([\d,]+) tokens"), r"KV cache: \1 tokens"),
    (re.compile(r"[Ww]arming up"), "warming up"),
    (re.compile(r"Capturing CUDA graph"), "capturing CUDA graphs"),
    (re.compile(r"init engine .* took ([\d.]+)"), r"engine ready after \1 s"),
    (re.compile(r"Application startup complete"), "server is up"),
)


_SHARDS = re.compile(r"(?:pid=(?P<process>\d+)[^\n]*?)?\d+% Completed \| (?P<done>\d+)/(?P<of>\d+)")


def stage_of_start(log: str) -> str:
    """How far a server has come, from its log; "" when it has said nothing of it yet."""
    latest, text = -1, ""
    for pattern, shown in _STAGES:
        for match in pattern.finditer(log):
            if match.start() > latest:
                latest, text = match.start(), match.expand(shown) or _weights(log)
    return text


def _weights(log: str) -> str:
    """Files of weights that are loaded, of the process that has the most still to load."""
    latest = {match["process"]: match for match in _SHARDS.finditer(log)}
    slowest = min(latest.values(), key=lambda match: int(match["done"]) - int(match["of"]))
    among = f", the slowest of {len(latest)} ranks" if len(latest) > 1 else ""
    return f"weights: {slowest['done']} of {slowest['of']} files{among}"
