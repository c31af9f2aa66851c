"""`mtppp export cluster.yaml`"""

from __future__ import annotations

from pathlib import Path

import click

from mtppp.cli.deployments import deployment_argument, resolve
from mtppp.cluster import Cluster
from mtppp.errors import ConfigurationError
from mtppp.exporter.commands import node_commands
from mtppp.exporter.scripts import shell_script, slurm_script
from mtppp.hosts.facts import GpuFacts, HostFacts
from mtppp.model.config import find_config
from mtppp.model.facts import read_facts
from mtppp.plan.admission import refuse
from mtppp.plan.plan import Plan
from mtppp.plan.plugins import PluginBundle, bundle
from mtppp.plan.review import review

_PLUGINS = "/opt/mtppp-plugins"


@click.command(name="export")
@deployment_argument
@click.option(
    "--format",
    "form",
    type=click.Choice(["shell", "slurm"]),
    default="shell",
    show_default=True,
    help="A block of shell per node, or a SLURM batch script.",
)
@click.option(
    "--plugins",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the plugins into this new directory, to be copied to every node.",
)
@click.option(
    "--plugins-on-node",
    default=_PLUGINS,
    show_default=True,
    help="Where the plugins lie on every node.",
)
def command(
    deployment: str | None, form: str, directory: Path | None, plugins_on_node: str
) -> None:
    """Print plain `vllm serve` commands for those who must run a deployment without mtppp.

    What is then missing stands at their head. What mtppp would refuse to launch is not exported.
    """
    known = resolve(deployment)
    cluster = known.cluster
    if cluster.runtime.environment:
        raise ConfigurationError(
            f"{known.file}: runtime.environment is managed:"
            " without mtppp nobody makes that environment",
            hint="install vLLM and Ray on every node, and name their Python in runtime.python",
        )
    plugins = _bundle(cluster)
    plan = _plan(cluster, plugins)
    nodes = node_commands(plan)
    notes = _notes(cluster, plan)
    if directory is not None:
        _write(plugins, directory)
    if form == "shell":
        click.echo(shell_script(plan, nodes, plugins_on_node, notes), nl=False)
        return
    gpus = max(node.gpus for node in cluster.nodes)
    click.echo(slurm_script(plan, nodes, plugins_on_node, gpus, notes), nl=False)


def _plan(cluster: Cluster, plugins: PluginBundle) -> Plan:
    """The Plan as it is without asking a host.

    Raises:
        Refused: a launch would refuse it.
        ConfigurationError: the file still holds placeholders.
    """
    model = cluster.model
    config = find_config(str(model.config) if model.config else model.id, revision=model.revision)
    hosts = [
        HostFacts.assumed(
            node.address,
            python=cluster.runtime.python,
            vllm=cluster.runtime.vllm,
            gpus=[GpuFacts.of_type(node.gpu_type)] * node.gpus if node.gpu_type else (),
        )
        for node in cluster.nodes
    ]
    reviewed = review(cluster, model=read_facts(config.values), bundle=plugins.name, facts=hosts)
    refuse(reviewed.subject, reviewed.refusals)
    if reviewed.placeholders:
        raise ConfigurationError(
            f"the file is not filled in: {reviewed.placeholders[0]}",
            details=reviewed.placeholders[1:],
            hint="set it in the file and export again",
        )
    return reviewed.plan


def _notes(cluster: Cluster, plan: Plan) -> list[str]:
    notes = []
    if plan.at_own_risk:
        notes.append(f"AT YOUR OWN RISK, by the cluster file: {', '.join(plan.at_own_risk)}.")
    is_found = cluster.parallel.layer_partition == "auto" and plan.pipeline > 1
    if is_found and not all(node.gpu_type for node in cluster.nodes):
        notes.append(
            "The layer partition was found without knowing the GPUs' memory; gpu_type in the "
            "cluster file names them."
        )
    return notes


def _bundle(cluster: Cluster) -> PluginBundle:
    return bundle(["mtppp_patches", *(["mtppp_cpu"] if cluster.runtime.device == "cpu" else [])])


def _write(plugins: PluginBundle, directory: Path) -> None:
    if directory.exists() and any(directory.iterdir()):
        raise ConfigurationError(
            f"{directory}: is not empty", hint="name a directory that does not exist"
        )
    for name, content in plugins.files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    click.echo(f"plugins {plugins.name} written to {directory}", err=True)
