"""`mtppp list HOST`: what a host tells of its deployments where the operator's records are lost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner
from sshd_server import LOOPBACK, USER, Sshd

from mtppp import state
from mtppp.cli.main import cli
from mtppp.cluster import Cluster


def test_what_a_host_tells_is_known_again(
    sshd: Sshd,
    home: Path,
    run_directory: str,
    make_cluster: Callable[..., Cluster],
) -> None:
    (home / ".ssh" / "config").write_text(
        f"""
        Host node-a
            HostName {LOOPBACK}
            Port {sshd.port}
            IdentityFile {sshd.client_key}
            UserKnownHostsFile {sshd.known_hosts}
        """
    )
    cluster = make_cluster(name=Path(run_directory).parent.name)
    Path(run_directory).mkdir(mode=0o700, parents=True)
    Path(run_directory, "cluster.json").write_text(state.record(cluster, Path("/its/file")))
    listed = CliRunner().invoke(cli, ["list", f"{USER}@node-a", "--python", sys.executable])
    assert (listed.exit_code, listed.exception) == (0, None)
    assert cluster.name in listed.stderr.partition("node-a tells of ")[2]
    assert state.known()[cluster.name] == state.Known(cluster, Path("/its/file"))
