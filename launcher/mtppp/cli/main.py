"""The command `mtppp`. Commands are imported when they are run, so that --help is quick."""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from mtppp import __version__
from mtppp.errors import MtpppError

INTERRUPTED = 130
NOBODY_READS = 128 + signal.SIGPIPE
"""As a shell has it for a command whose reader is gone: it says nothing of what was asked."""
_WIDEST = 80

# name -> (module, one line for --help)
COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("mtppp.cli.init", "Write a first cluster file."),
    "import": ("mtppp.cli.import_commands", "Turn vllm serve commands into a cluster file."),
    "launch": ("mtppp.cli.launch", "Launch a deployment and check its first tokens."),
    "plan": ("mtppp.cli.plan", "Show all that a launch would do, and do nothing."),
    "status": ("mtppp.cli.status", "Say what runs where, and whether tokens come."),
    "open": ("mtppp.cli.open", "Serve what was not verified, at your own risk."),
    "verify": ("mtppp.cli.verify", "Decide whether a server still gives the same model."),
    "baseline": ("mtppp.cli.baseline", "Keep a baseline, to verify by it when it is gone."),
    "answers": ("mtppp.cli.answers", "Verify in two steps, at two places."),
    "forward": ("mtppp.cli.forward", "Make the endpoint reachable on this machine, through ssh."),
    "logs": ("mtppp.cli.logs", "Print the logs of all nodes, in the order of time."),
    "list": ("mtppp.cli.list", "List the deployments launched from here."),
    "patches": ("mtppp.cli.patches", "Say what is changed inside vLLM, and what is proven."),
    "model": ("mtppp.cli.model", "Look at a model, from its config.json."),
    "export": ("mtppp.cli.export", "Print plain commands, for running without mtppp."),
    "completion": ("mtppp.cli.completion", "Print what makes a shell complete these commands."),
    "stop": ("mtppp.cli.stop", "End a deployment, and only what it started."),
}


_OF_WRITING = {
    *(errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    *(errno.EIO, errno.EBADF),
}


class UnwritableError(Exception):
    """Standard output cannot be written. No OSError: click ends those with a status of its own."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror)
        self.nobody_reads = isinstance(error, BrokenPipeError)


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # An error of a file that was opened by name has the name.
        if error.errno in _OF_WRITING and error.filename is None:
            raise UnwritableError(error) from None
        raise


class LazyGroup(click.Group):
    """A group whose commands are modules, imported when they are asked for."""

    def make_context(self, *arguments: Any, **settings: Any) -> click.Context:
        with _writing():
            return super().make_context(*arguments, **settings)

    def invoke(self, ctx: click.Context) -> Any:
        with _writing():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_) for name, (_, help_) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mtppp")
def cli() -> None:
    """Launch vLLM over several hosts with pipeline parallelism and MTP, and prove it is right.

    Exit status: 0 done or PASS, 1 failed or FAIL, 2 invalid usage or configuration,
    3 inconclusive, 4 refused as unsafe, 130 interrupted, 141 nobody reads the output.
    """


def main() -> None:
    """Run the command line; every error ends in a message and its exit status."""
    try:
        status = cli.main(
            prog_name="mtppp",
            standalone_mode=False,
            # Left alone, click takes a terminal to have 50 columns at least.
            terminal_width=min(shutil.get_terminal_size().columns, _WIDEST),
        )
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)
    except MtpppError as error:
        from mtppp.console import Console  # noqa: PLC0415 - rich is slow to import

        Console().error(error)
        sys.exit(error.exit_status)
    except UnwritableError as error:
        # Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.nobody_reads:
            sys.exit(NOBODY_READS)
        sys.stderr.write(f"error: standard output cannot be written: {error}\n")
        sys.exit(1)
    sys.exit(status or 0)
