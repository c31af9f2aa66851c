"""`mtppp list`"""

from __future__ import annotations

import json

import click

from mtppp import state


@click.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON, for programs.")
def command(as_json: bool) -> None:
    """List the deployments that were launched from here and not stopped.

    From the operator's own records: `mtppp status NAME` asks the nodes.
    """
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
        hosts = ", ".join(node.host for node in known.cluster.nodes)
        click.echo(f"{name}  {known.cluster.model.served_name} on {hosts}  ({known.file})")
    if not remembered:
        click.echo("no deployment is known here", err=True)
