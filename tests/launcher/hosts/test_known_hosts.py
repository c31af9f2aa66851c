"""What known_hosts files say about a host's key."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from mtppp.hosts.known_hosts import KnownHosts, Standing, fingerprint, recorded_name

KEY, OTHER = b"the key", b"another key"
ED25519 = "ssh-ed25519"


def line(names: str, blob: bytes = KEY, kind: str = ED25519) -> str:
    return f"{names} {kind} {base64.b64encode(blob).decode()} comment\n"


def read(tmp_path: Path, *lines: str) -> KnownHosts:
    path = tmp_path / "known_hosts"
    path.write_text("".join(lines))
    return KnownHosts.read([tmp_path / "missing", path])


@pytest.mark.parametrize(
    ("names", "trusted"),
    [
        ("node-a", True),
        ("NODE-A", True),
        ("other,node-a", True),
        ("node-*", True),
        ("node-?", True),
        ("node-*,!node-a", False),
        ("!node-a,node-*", False),
        ("node", False),
        ("[node-a]:22", False),
        ("node-[a]", False),
        ("node.a", False),
    ],
)
def test_patterns(tmp_path: Path, names: str, trusted: bool) -> None:
    standing, _ = read(tmp_path, line(names)).judge(["node-a"], ED25519, KEY)
    assert standing is (Standing.TRUSTED if trusted else Standing.UNKNOWN)


def test_port_in_brackets(tmp_path: Path) -> None:
    known = read(tmp_path, line("[node-a]:2222"))
    assert known.judge([recorded_name("Node-A", 2222)], ED25519, KEY)[0] is Standing.TRUSTED
    assert known.judge([recorded_name("node-a", 22)], ED25519, KEY)[0] is Standing.UNKNOWN


def test_changed_names_the_line(tmp_path: Path) -> None:
    known = read(tmp_path, "# comment\n", "\n", line("node-a", OTHER))
    standing, lines = known.judge(["node-a"], ED25519, KEY)
    assert standing is Standing.CHANGED
    assert [known_key.origin for known_key in lines] == [f"{tmp_path / 'known_hosts'}:3"]


def test_one_of_several_keys_is_enough(tmp_path: Path) -> None:
    known = read(tmp_path, line("node-a", OTHER), line("node-a", KEY))
    assert known.judge(["node-a"], ED25519, KEY)[0] is Standing.TRUSTED


def test_same_bytes_under_another_type_are_another_key(tmp_path: Path) -> None:
    known = read(tmp_path, line("node-a", kind="ssh-rsa"))
    assert known.judge(["node-a"], ED25519, KEY)[0] is Standing.CHANGED


def test_name_without_port_vouches_but_raises_no_alarm(tmp_path: Path) -> None:
    names = ["[node-a]:2222", "node-a"]
    known = read(tmp_path, line("node-a", KEY))
    assert known.judge(names, ED25519, KEY)[0] is Standing.TRUSTED
    assert known.judge(names, ED25519, OTHER)[0] is Standing.UNKNOWN


@pytest.mark.parametrize("order", [1, -1])
def test_revoked_wins(tmp_path: Path, order: int) -> None:
    lines = [line("node-a"), line("@revoked node-*")][::order]
    assert read(tmp_path, *lines).judge(["node-a"], ED25519, KEY)[0] is Standing.REVOKED
    assert read(tmp_path, *lines).judge(["other"], ED25519, KEY)[0] is Standing.UNKNOWN


def test_revoked_key_says_nothing_of_another(tmp_path: Path) -> None:
    known = read(tmp_path, line("node-a", KEY), line("@revoked *", OTHER))
    assert known.judge(["node-a"], ED25519, KEY)[0] is Standing.TRUSTED


def test_authority_is_no_host_key(tmp_path: Path) -> None:
    known = read(tmp_path, line("@cert-authority *.example.com"))
    assert known.judge(["a.example.com"], ED25519, KEY)[0] is Standing.UNKNOWN
    assert known.trusts_authority_for("a.example.com")
    assert not known.trusts_authority_for("a.example.org")


def test_key_types_in_order(tmp_path: Path) -> None:
    known = read(
        tmp_path,
        line("[a]:22", kind="unrelated"),
        line("a", kind="ssh-rsa"),
        line("a", OTHER),
        line("a", KEY),
    )
    assert known.key_types(["a"]) == ["ssh-rsa", ED25519]


@pytest.mark.parametrize(
    "junk", ["node-a", "node-a ssh-ed25519", "node-a ssh-ed25519 !!!", "|1|x ssh-ed25519 AAAA"]
)
def test_junk_is_passed_over(tmp_path: Path, junk: str) -> None:
    known = read(tmp_path, f"{junk}\n", line("node-a"))
    assert known.judge(["node-a"], ED25519, KEY)[0] is Standing.TRUSTED


def test_fingerprint_is_openssh_s() -> None:
    blob = base64.b64decode("AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl")
    assert fingerprint(blob) == "SHA256:+DiY3wvvV6TuJJhbpZisF/zLDA0zPMSvHdkr4UvCOqU"
