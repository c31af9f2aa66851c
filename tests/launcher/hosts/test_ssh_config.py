"""The way to a host, as read from the OpenSSH client's files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mtppp.hosts.ssh_config import Endpoint, SshTarget, resolve_route


@pytest.fixture
def config(home: Path) -> Path:
    return home / ".ssh" / "config"


def target_of(host: str, **changes: object) -> Endpoint:
    return resolve_route(dataclasses.replace(SshTarget(host), **changes))[-1]  # type: ignore[arg-type]


def test_without_any_file(home: Path) -> None:
    endpoint = target_of("node-a")
    assert (endpoint.hostname, endpoint.port) == ("node-a", 22)
    assert endpoint.default_keys[0] == home / ".ssh" / "id_ed25519"
    assert endpoint.known_hosts == (
        home / ".ssh" / "known_hosts",
        home / ".ssh" / "known_hosts2",
        Path("/etc/ssh/ssh_known_hosts"),
    )
    assert endpoint.proxy_command is None


def test_all_settings(config: Path, home: Path) -> None:
    config.write_text(
        """
        Host other
            HostName wrong
        Host node-?
            HostName %h.example.com
            User ubuntu
            Port 2222
            IdentityFile ~/keys/%h
            IdentityFile none
            IdentitiesOnly yes
            UserKnownHostsFile ~/known "/a b/known"
            HostKeyAlias A
            ConnectTimeout 1m30s
            ServerAliveInterval 4
        """
    )
    assert target_of("node-a") == Endpoint(
        name="node-a",
        hostname="node-a.example.com",
        port=2222,
        user="ubuntu",
        host_key_alias="A",
        known_hosts=(home / "known", Path("/a b/known"), Path("/etc/ssh/ssh_known_hosts")),
        identity_files=(home / "keys" / "node-a.example.com",),
        default_keys=(),
        identities_only=True,
        connect_timeout=90.0,
        keepalive_interval=4.0,
        proxy_command=None,
    )


def test_signs_of_life_are_never_rarer_than_ours(config: Path) -> None:
    config.write_text("Host a\n ServerAliveInterval 300\nHost b\n ServerAliveInterval 0\n")
    assert target_of("a").keepalive_interval == target_of("b").keepalive_interval == 10.0


def test_explicit_settings_win(config: Path, home: Path) -> None:
    config.write_text("Host *\n User u\n Port 1\n IdentityFile f\n ConnectTimeout 9\n")
    endpoint = target_of(
        "a",
        user="me",
        port=2,
        identity_file=Path("~/mine"),
        known_hosts=Path("~/known"),
        connect_timeout=3.0,
    )
    assert (endpoint.user, endpoint.port, endpoint.connect_timeout) == ("me", 2, 3.0)
    assert endpoint.identity_files == (home / "mine",)
    assert endpoint.known_hosts == (home / "known",)


def test_explicit_port_reaches_the_proxy_command(config: Path) -> None:
    config.write_text("Host *\n ProxyCommand relay %h %p %r\n")
    endpoint = target_of("a", port=2222, user="me")
    assert endpoint.proxy_command == "relay a 2222 me"


@pytest.mark.parametrize("pattern", ["nodes", "~/.ssh/nodes", "no*", '"nodes"', "missing nodes"])
def test_include(config: Path, home: Path, pattern: str) -> None:
    (home / ".ssh" / "nodes").write_text("Host a\n HostName included\n")
    config.write_text(f"Include {pattern}\n")
    assert target_of("a").hostname == "included"


def test_included_files_come_in_order_and_in_place(config: Path, home: Path) -> None:
    (home / ".ssh" / "conf.d").mkdir()
    (home / ".ssh" / "conf.d" / "20").write_text("User second\nPort 2\n")
    (home / ".ssh" / "conf.d" / "10").write_text("User first\n")
    config.write_text("Include=conf.d/*\nUser last\nPort 3\n")
    assert (target_of("a").user, target_of("a").port) == ("first", 2)


def test_include_within_a_block_holds_for_that_block_alone(config: Path, home: Path) -> None:
    (home / ".ssh" / "inner").write_text("User inner\nHost a c\n HostName inner-%h\n")
    config.write_text("Host a b\n Include inner\n Port 5\nHost *\n User outer\n")
    found = {name: target_of(name) for name in "abc"}
    assert {name: endpoint.user for name, endpoint in found.items()} == {
        "a": "inner",
        "b": "inner",
        "c": "outer",
    }
    assert {name: endpoint.hostname for name, endpoint in found.items()} == {
        "a": "inner-a",
        "b": "b",
        "c": "c",
    }
    # After the Include, the block that it is in goes on.
    assert {name: endpoint.port for name, endpoint in found.items()} == {"a": 5, "b": 5, "c": 22}


def test_negated_patterns_survive_an_include(config: Path, home: Path) -> None:
    (home / ".ssh" / "inner").write_text("User inner\n")
    config.write_text("Host * !b\n Include inner\n Port 5\n")
    assert (target_of("a").user, target_of("a").port) == ("inner", 5)
    assert target_of("b").port == 22


def test_match_blocks(config: Path) -> None:
    config.write_text(
        "Host b\n HostName b.example.com # not b\n"
        "Match host *.example.com\n Port 7\n"
        "Match originalhost a exec \"test '%n' = a\"\n User matched\n"
        "Match !originalhost a\n User other\n"
        "Match all\n Port 8\n"
    )
    assert (target_of("a").user, target_of("a").port) == ("matched", 8)
    assert (target_of("b").user, target_of("b").port) == ("other", 7)


def test_match_final_sees_what_all_blocks_have_said(config: Path) -> None:
    config.write_text("Match final host *.com\n User final\nHost a\n HostName a.com\n")
    assert target_of("a").user == "final"
    assert target_of("b").user != "final"


def test_match_exec_runs_only_where_it_decides(config: Path, home: Path) -> None:
    config.write_text(f"Match originalhost a exec 'touch {home}/ran-%n'\n User matched\n")
    assert target_of("b").user != "matched"
    assert not (home / "ran-b").exists()
    assert target_of("a").user == "matched"
    assert (home / "ran-a").exists()


def test_include_goes_sixteen_deep_and_no_further(config: Path) -> None:
    config.write_text("Include config\n")
    with pytest.raises(Exception, match="nested more than 16 deep"):
        target_of("a")


def test_jumps(config: Path, home: Path) -> None:
    config.write_text(
        """
        Host node
            ProxyJump first,me@second:2222
        Host first
            HostName first.example.com
            ProxyJump ssh://outermost:22
        Host second
            ProxyJump ignored
            IdentityFile ~/second
        """
    )
    route = resolve_route(SshTarget("node", user="u", port=9, identity_file=Path("~/given")))
    assert [(hop.hostname, hop.port) for hop in route] == [
        ("outermost", 22),
        ("first.example.com", 22),
        ("second", 2222),
        ("node", 9),
    ]
    assert (route[2].user, route[3].user) == ("me", "u")
    assert route[2].identity_files == (home / "second", home / "given")
    assert route[3].identity_files == (home / "given",)


@pytest.mark.parametrize(
    ("lines", "command", "hops"),
    [
        ("ProxyCommand one\n ProxyJump two", "one", 1),
        ("ProxyJump two\n ProxyCommand one", None, 2),
        ("ProxyJump none\n ProxyCommand one", None, 1),
        ("ProxyCommand none\n ProxyJump two", None, 1),
    ],
)
def test_the_first_kind_of_proxy_counts(
    config: Path, lines: str, command: str | None, hops: int
) -> None:
    config.write_text(f"Host node\n {lines}\n")
    route = resolve_route(SshTarget("node"))
    assert (route[-1].proxy_command, len(route)) == (command, hops)


def test_explicit_jump_wins(config: Path) -> None:
    config.write_text("Host node\n ProxyCommand one\n")
    route = resolve_route(SshTarget("node", proxy_jump="[::1]:23"))
    assert [(hop.hostname, hop.port) for hop in route] == [("::1", 23), ("node", 22)]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ("node",)),
        ({"port": 2222}, ("[node]:2222", "node")),
        ({"port": 2222, "host_key_alias": "Alias"}, ("alias",)),
    ],
)
def test_names_in_known_hosts(changes: dict[str, object], names: tuple[str, ...]) -> None:
    endpoint = dataclasses.replace(target_of("NODE"), **changes)  # type: ignore[arg-type]
    assert endpoint.recorded_names == names
