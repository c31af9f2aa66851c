"""What commands make of their arguments, and how a shell completes them; in this process."""

from __future__ import annotations

import os
import pty
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.shell_completion import CompletionItem, ShellComplete
from click.testing import CliRunner

from mtppp import state
from mtppp.cli.deployments import working_on
from mtppp.cli.main import cli
from mtppp.cluster import Cluster
from mtppp.console import Console
from mtppp.errors import ConfigurationError, ConnectFailed, MtpppError
from mtppp.phases.deployment import Deployment
from mtppp.phases.interrupts import Detached

HERE: dict[str, Any] = {
    "name": "here",
    "model": {"id": "/models/m"},
    "nodes": [{"host": "a", "address": "127.0.1.1", "transport": "local", "gpus": 1}],
    "runtime": {"vllm": "0.32.0", "python": sys.executable},
    "serve": {"port": 1},
}


@pytest.fixture(autouse=True)
def in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def failure(kind: type[MtpppError], *arguments: str) -> MtpppError:
    with pytest.raises(kind) as caught:
        cli.main(list(arguments), standalone_mode=False)
    return caught.value


@pytest.mark.parametrize(
    "command",
    ["launch", "plan", "status", "stop", "logs", "forward", "export", "open", "verify"],
)
def test_every_command_takes_a_file_or_a_name(command: str, in_directory: Path) -> None:
    nowhere = failure(ConfigurationError, command, "nowhere")
    assert nowhere.message.startswith("nowhere: no such file, and no deployment of that name")
    assert nowhere.hint == "give its cluster file, or have one of its hosts tell: mtppp list HOST"
    alone = failure(ConfigurationError, command).message
    assert alone == "there is no cluster.yaml here, and 0 deployments are known"
    (in_directory / "cluster.yaml").write_text("name: here")
    assert "cluster.yaml" in failure(ConfigurationError, command).message


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["--node", "b"], "here has no node b", "its nodes are a"),
        (["--rank", "1"], "here has no rank 1", "its ranks are 0 to 0"),
        (["--since", "soon"], "--since soon: no time", "such as 90s, 10m"),
        (["--since", f"1{0:0400}d"], f"--since 1{0:0400}d: no time", "such as 90s, 10m"),
    ],
)
def test_logs_of_what_there_is_not(
    in_directory: Path, arguments: list[str], message: str, hint: str
) -> None:
    (in_directory / "cluster.yaml").write_text(yaml.safe_dump(HERE))
    error = failure(ConfigurationError, "logs", *arguments)
    assert error.message == message
    assert error.hint.startswith(hint)


def test_forward_where_nothing_listens(in_directory: Path) -> None:
    (in_directory / "cluster.yaml").write_text(yaml.safe_dump(HERE))
    error = failure(ConnectFailed, "forward")
    assert error.message == "a: 127.0.1.1 port 1: Connection refused"
    assert error.hint == "`mtppp status here` says what runs"


def test_forward_to_a_port_that_is_taken(in_directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        nodes = [HERE["nodes"][0] | {"address": "127.0.0.1"}]
        content = HERE | {"nodes": nodes, "serve": {"port": port}}
        (in_directory / "cluster.yaml").write_text(yaml.safe_dump(content))
        error = failure(ConfigurationError, "forward")
    assert error.message == f"cannot listen at 127.0.0.1 port {port}: Address already in use"


@pytest.fixture
def protected(in_directory: Path, run_directory: str) -> str:
    """The name of the protected deployment of ./cluster.yaml, which nothing else has."""
    name = run_directory.split("/")[-2]
    (in_directory / "cluster.yaml").write_text(
        yaml.safe_dump(HERE | {"name": name, "protect": True})
    )
    return name


@pytest.mark.parametrize("given", [(), ("--yes", "there")])
def test_what_is_protected_wants_its_name(protected: str, given: tuple[str, ...]) -> None:
    error = failure(ConfigurationError, "stop", *given)
    assert error.message == f"{protected} is protected: nothing was stopped"
    assert error.hint == f"to stop it all the same: --yes {protected}"


def test_what_is_protected_is_stopped_by_its_name(protected: str) -> None:
    assert CliRunner().invoke(cli, ["stop", "--yes", protected]).exit_code == 0


@pytest.mark.parametrize("right", [True, False])
def test_its_name_is_typed_at_a_terminal(protected: str, right: bool) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, f"{protected if right else 'yes'}\n".encode())
    done = subprocess.run(
        [sys.executable, "-m", "mtppp", "stop"], stdin=theirs, capture_output=True, check=False
    )
    os.close(ours)
    os.close(theirs)
    assert (done.returncode, done.stdout) == (0 if right else 2, b"")
    assert f"{protected} is protected; its name, to go on: ".encode() in done.stderr


def test_a_state_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    for change in (
        lambda: state.remember(Cluster.model_validate(HERE), Path("x.yaml")),
        lambda: state.forget("here"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            change()
        assert caught.value.message.endswith("/here.json: cannot be written: Not a directory")
        assert caught.value.hint.startswith("set XDG_STATE_HOME to")


@pytest.mark.parametrize("command", ["status", "stop", "logs", "forward"])
def test_a_file_with_other_nodes_than_were_launched(command: str, in_directory: Path) -> None:
    node = HERE["nodes"][0]
    nodes = [node, node | {"host": "b", "address": "127.0.1.2"}]
    parallel = {"pipeline": 2}
    launched = Cluster.model_validate(HERE | {"nodes": nodes, "parallel": parallel})
    state.remember(launched, Path("x.yaml"))
    changed = HERE | {"nodes": nodes[::-1], "parallel": parallel}
    (in_directory / "cluster.yaml").write_text(yaml.safe_dump(changed))
    error = failure(ConfigurationError, command)
    assert error.message == "cluster.yaml has the nodes b, a; here was launched from here on a, b"
    assert error.hint.startswith("here in place of the file is as it was launched")


def test_a_launch_tells_of_a_host_that_the_file_has_lost(in_directory: Path) -> None:
    nodes = [HERE["nodes"][0], HERE["nodes"][0] | {"host": "b", "address": "127.0.1.2"}]
    launched = HERE | {"nodes": nodes, "parallel": {"pipeline": 2}}
    state.remember(Cluster.model_validate(launched), Path("x.yaml"))
    (in_directory / "cluster.yaml").write_text(yaml.safe_dump(HERE))
    done = CliRunner().invoke(cli, ["launch"])
    told = "b is no more in cluster.yaml: what was launched there is not stopped\n"
    assert done.stderr.startswith(told)


def test_a_record_that_cannot_be_read_is_not_called_unknown(in_directory: Path) -> None:
    state.remember(Cluster.model_validate(HERE), Path("x.yaml"))
    record = state.directory() / "here.json"
    record.write_text(record.read_text().replace('"runtime"', '"run_time"'))
    error = failure(ConfigurationError, "stop", "here")
    assert error.message.startswith(f"{record}: what was remembered of here cannot be read")
    listed = CliRunner().invoke(cli, ["list"])
    assert f"here: its record cannot be read by this mtppp ({record})" in listed.stderr


def completions(*words: str, incomplete: str) -> list[tuple[str, str]]:
    found: list[CompletionItem] = ShellComplete(cli, {}, "mtppp", "_X").get_completions(
        list(words), incomplete
    )
    return [(item.type, item.value) for item in found]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_what_the_shell_needs(shell: str) -> None:
    done = CliRunner().invoke(cli, ["completion", shell])
    assert done.exit_code == 0
    assert f"_MTPPP_COMPLETE={shell}_complete" in done.stdout


def test_commands_and_options_complete() -> None:
    assert completions(incomplete="sto") == [("plain", "stop")]
    assert completions("logs", incomplete="--f") == [("plain", "--follow")]


def test_deployments_and_files_complete(in_directory: Path) -> None:
    for name in ("here", "other"):
        state.remember(Cluster.model_validate(HERE | {"name": name}), Path("x.yaml"))
    assert completions("status", incomplete="h") == [("plain", "here"), ("file", "h")]
    assert [value for _, value in completions("stop", incomplete="")] == ["here", "other", ""]


def test_who_lets_go_is_told_how_to_go_on(
    in_directory: Path,
    make_cluster: Callable[..., Cluster],
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = Deployment(cluster=make_cluster(name="here"), file=Path("here.yaml"), nodes=[])

    def said() -> str:
        with pytest.raises(Detached), working_on(target, Console()):
            raise Detached
        return capsys.readouterr().err

    # Nothing of it could run yet, and by its name no command would find it.
    by_file = "`mtppp status here.yaml` says what runs, `mtppp stop here.yaml` ends it"
    assert said() == f"left as it is: {by_file}, `mtppp launch here.yaml` goes on\n"
    state.remember(target.cluster, target.file)
    by_name = "`mtppp status here` says what runs, `mtppp stop here` ends it"
    assert said() == f"left as it is: {by_name}, `mtppp launch here.yaml` goes on\n"
