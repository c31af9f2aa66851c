"""`mtppp completion`"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command(name="completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print what makes a shell complete commands, options, deployments and files.

    \b
    bash:  echo 'eval "$(mtppp completion bash)"' >> ~/.bashrc
    zsh:   echo 'eval "$(mtppp completion zsh)"' >> ~/.zshrc
    fish:  mtppp completion fish > ~/.config/fish/completions/mtppp.fish
    """
    complete = get_completion_class(shell)
    assert complete is not None, "click knows these three"
    click.echo(complete(ctx.find_root().command, {}, "mtppp", "_MTPPP_COMPLETE").source())
