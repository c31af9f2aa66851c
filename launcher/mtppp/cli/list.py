"""`mtppp list`"""

from __future__ import annotations

import json
from pathlib import Path

import click

from mtppp import state
from mtppp.console import Console, folded
from mtppp.hosts.node import Node
from mtppp.hosts.ssh import SshTarget, SshTransport
from mtppp.phases.find import find


@click.command(name="list")
@click.argument("hosts", metavar="[HOST]...", nargs=-1)
@click.option(
    "--ssh-config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The ssh configuration that knows the hosts; ~/.ssh/config by default.",
)
@click.option(
    "--python",
    metavar="PATH",
    default="/usr/bin/python3",
    show_default=True,
    help="A Python on the hosts, 3.9 or newer.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as JSON, for programs.")
def command(hosts: tuple[str, ...], ssh_config: Path | None, python: str, as_json: bool) -> None:
    """List the deployments that were launched from here and not stopped.

    From the operator's own records: `mtppp status NAME` asks the nodes. Where those are lost, any
    HOST of a deployment tells of it, and it is known here again.
    """
    console = Console()
    for host in hosts:
        found = _remember(host, ssh_config, python)
        console.say(f"{host} tells of {', '.join(found) or 'no deployment of yours'}")
    remembered = state.known()
    if as_json:
        rows = [
            {
                "name": name,
                "file": str(known.file),
                "model": known.cluster.model.id,
                "hosts": [node.host for node in known.cluster.nodes],
            }
            for name, known in remembered.items()
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    for name, known in remembered.items():
        on = ", ".join(node.host for node in known.cluster.nodes)
        click.echo(folded(f"{name}  {known.cluster.model.served_name} on {on}  ({known.file})"))
    for name, path in state.unreadable().items():
        console.say(f"{name}: its record cannot be read by this mtppp ({path})")
    if not remembered:
        console.say(
            "no deployment is known here; a host tells what was launched there: mtppp list HOST"
        )


def _remember(host: str, ssh_config: Path | None, python: str) -> list[str]:
    """The names of what a host tells of, once they are remembered here."""
    user, _, name = host.rpartition("@")
    target = SshTarget(host=name, user=user or None, config_file=ssh_config)
    node = Node(SshTransport(target), python)
    try:
        found = find(node)
    finally:
        node.transport.close()
    for known in found:
        state.remember(known.cluster, known.file)
    return [known.cluster.name for known in found]
