"""Where the agent may write, read and remove; and what it makes of the host."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import AGENT, START, answer, ask, ask_all

UID = os.getuid()
ROOT = f"/var/tmp/mtppp-{UID}"
STRANGER = 54321
"""A user that nobody is, to act as; only root can."""

as_root = pytest.mark.skipif(UID != 0, reason="acts as another user, which only root can")


def file(path: str, data: bytes = b"data", mode: int = 0o600) -> dict[str, Any]:
    return {"path": path, "data": base64.b64encode(data).decode(), "mode": mode}


def write(directory: str, *files: dict[str, Any]) -> dict[str, Any]:
    return ask("write", directory=directory, files=files)


def names(directory: str) -> list[str]:
    return sorted(path.name for path in Path(directory).iterdir())


def mode_of(path: str | Path) -> int:
    return Path(path).stat().st_mode & 0o777


def test_files_get_their_contents_and_modes_whatever_the_umask(run_directory: str) -> None:
    umask = os.umask(0)
    try:
        assert write(
            run_directory,
            file("plan.json", bytes(range(256))),
            file("a/b/program", b"#!", 0o755),
        ) == {"answer": {}}
    finally:
        os.umask(umask)
    assert Path(run_directory, "plan.json").read_bytes() == bytes(range(256))
    assert mode_of(f"{run_directory}/plan.json") == 0o600
    assert mode_of(f"{run_directory}/a/b/program") == 0o755
    for directory in (Path(run_directory).parent, run_directory, f"{run_directory}/a/b"):
        assert mode_of(directory) == 0o700


def test_a_file_is_replaced_whole(run_directory: str) -> None:
    write(run_directory, file("a", b"long contents", 0o644))
    reader = Path(run_directory, "a").open("rb")  # noqa: SIM115 - open across the replacement
    write(run_directory, file("a", b"new"))
    with reader:
        assert reader.read() == b"long contents"
    assert Path(run_directory, "a").read_bytes() == b"new"
    assert mode_of(f"{run_directory}/a") == 0o600
    assert names(run_directory) == ["a"]


def test_a_write_that_fails_leaves_nothing_half_done(run_directory: str) -> None:
    write(run_directory, file("a/b"))
    failed = write(run_directory, file("a"))
    assert "error" in failed
    assert names(run_directory) == ["a"]
    assert names(f"{run_directory}/a") == ["b"]


@pytest.mark.parametrize("path", ["../outside", "/etc/outside", "a/../../outside", ".", ""])
def test_files_stay_below_their_directory(run_directory: str, path: str) -> None:
    failed = write(run_directory, file(path))
    assert failed["error"].endswith(f" is not below {run_directory}")
    assert not Path(run_directory).parent.joinpath("outside").exists()


def requests(directory: str) -> dict[str, dict[str, Any]]:
    """One request of every operation that touches a run directory."""
    return {
        "write": {"directory": directory, "files": []},
        "exists": {"path": f"{directory}/x"},
        "read": {"pattern": f"{directory}/*", "limit": 10},
        "clear": {"directory": directory, "ray_directory": f"{directory}/r", "names": []},
        "set_aside": {"directory": directory, "ray_directory": f"{directory}/r", "names": []},
        "start": {"role": "r", "argv": ["true"], "env": {}, "directory": directory, "log": "l"},
        "run": {"argv": ["true"], "env": {}, "directory": directory, "timeout": 5},
        "processes": {"directory": directory},
        "stop": {"directory": directory, "grace": {}, "segments_file": "s"},
        "logs": {
            "directory": directory,
            "ray_directory": f"{directory}/r",
            "names": [],
            "since": 0,
            "limit": 10,
            "positions": {},
        },
    }


OF_NO_DIRECTORY = ("look", "gpu_memory", "listeners", "weights")
OPERATIONS = sorted(requests(""))


def test_every_operation_on_a_directory_is_in_these_tests() -> None:
    defined = {
        line.partition("(")[0].removeprefix("def op_")
        for line in AGENT.read_text().splitlines()
        if line.startswith("def op_")
    }
    assert defined - {"facts", "uid", "hold", *OF_NO_DIRECTORY} == set(OPERATIONS)


def ask_each(directory: str, *, uid: int = UID) -> dict[str, dict[str, Any]]:
    """The whole answer of each operation on a directory."""
    asked = [{"op": op, **request} for op, request in requests(directory).items()]
    answers = ask_all(asked, uid=uid)
    return {request["op"]: whole for request, whole in zip(asked, answers, strict=True)}


@pytest.mark.parametrize(
    "outside", ["/etc", f"{ROOT}/../elsewhere", f"{ROOT}x/a", "/var/tmp/mtppp-999999/a", ROOT[:-1]]
)
def test_no_operation_goes_outside(outside: str) -> None:
    paths = {"exists": f"{outside}/x", "read": f"{outside}/*"}
    assert ask_each(outside) == {
        op: {"error": f"{paths.get(op, outside)} is not a path of mtppp's"} for op in OPERATIONS
    }


@pytest.fixture
def strangers_root() -> Iterator[Path]:
    """Where the directory of a user that nobody is would be."""
    root = Path(f"/var/tmp/mtppp-{STRANGER}")
    assert not os.path.lexists(root)
    yield root
    if root.is_symlink():
        root.unlink()
    shutil.rmtree(root, ignore_errors=True)


@as_root
def test_a_directory_that_somebody_else_made_is_refused(strangers_root: Path) -> None:
    inner = strangers_root / "demo" / "0"
    inner.mkdir(parents=True)
    for directory in (strangers_root, inner.parent, inner):
        directory.chmod(0o777)
    refusal = {"error": f"{strangers_root} belongs to user {UID}: have it removed"}
    assert ask_each(str(inner), uid=STRANGER) == dict.fromkeys(OPERATIONS, refusal)
    assert list(inner.iterdir()) == []


@as_root
def test_a_link_in_place_of_the_directory_is_refused(
    strangers_root: Path, run_directory: str
) -> None:
    # The target is the user's own: following the link would find nothing wrong.
    target = Path(run_directory).parent
    (target / "demo" / "0").mkdir(parents=True)
    for directory in (target, target / "demo", target / "demo" / "0"):
        os.chown(directory, STRANGER, STRANGER)
    strangers_root.symlink_to(target)
    refusal = {
        "error": f"{strangers_root} is not a directory; somebody may have put it there: remove it"
    }
    answers = ask_each(f"{strangers_root}/demo/0", uid=STRANGER)
    assert answers == dict.fromkeys(OPERATIONS, refusal)


@as_root
def test_a_directory_that_others_can_write_to_is_refused(strangers_root: Path) -> None:
    strangers_root.mkdir()
    os.chown(strangers_root, STRANGER, STRANGER)
    strangers_root.chmod(0o770)
    refusal = {"error": f"others can write to {strangers_root}: check what is in it and remove it"}
    answers = ask_each(f"{strangers_root}/demo/0", uid=STRANGER)
    assert answers == dict.fromkeys(OPERATIONS, refusal)


@as_root
def test_the_first_write_makes_a_private_root(strangers_root: Path) -> None:
    umask = os.umask(0)
    try:
        request = {"op": "write", "directory": f"{strangers_root}/demo/0", "files": []}
        [whole] = ask_all([request], uid=STRANGER)
    finally:
        os.umask(umask)
    assert whole == {"answer": {}}
    assert strangers_root.stat().st_uid == STRANGER
    assert mode_of(strangers_root) == 0o700


def test_exists(run_directory: str) -> None:
    write(run_directory, file("a"))
    assert answer("exists", path=f"{run_directory}/a") == {"exists": True}
    assert answer("exists", path=f"{run_directory}/b") == {"exists": False}


def test_read_gives_the_end_of_long_files_and_no_error_for_odd_ones(run_directory: str) -> None:
    write(run_directory, file("rank-0", b"0123456789"), file("rank-1", b"\xff\xfe"))
    Path(run_directory, "rank-2").mkdir()
    assert answer("read", pattern=f"{run_directory}/rank-*", limit=4) == {
        "files": {
            f"{run_directory}/rank-0": "6789",
            f"{run_directory}/rank-1": "\ufffd\ufffd",
            f"{run_directory}/rank-2": "",
        }
    }
    assert answer("read", pattern=f"{run_directory}/none-*", limit=4) == {"files": {}}


def test_clear_removes_what_is_named_and_keeps_logs(run_directory: str) -> None:
    ray = f"{run_directory}-ray"
    write(run_directory, file("ray-token"), file("attest/rank-0000.json"), file("server.log"))
    write(run_directory, file("ray-logs/old.log"))
    write(ray, file("session_2026-11-28_1/logs/old.log"), file("session_2026-11-29_2/logs/gcs.out"))
    Path(ray, "session_latest").symlink_to(f"{ray}/session_2026-11-29_2")
    known = ["ray-token", "attest", "never-was"]
    answer("clear", directory=run_directory, ray_directory=ray, names=known)
    assert names(run_directory) == ["ray-logs", "server.log"]
    assert names(f"{run_directory}/ray-logs") == ["gcs.out"]
    assert not Path(ray).exists()
    assert answer("clear", directory=run_directory, ray_directory=ray, names=known) == {}
    assert names(f"{run_directory}/ray-logs") == ["gcs.out"]


def test_logs_are_set_aside_but_those_of_who_still_writes(run_directory: str) -> None:
    ray, session = f"{run_directory}-ray", "session_2026-11-29_2/logs"
    write(run_directory, file("server.log", b"2"), file("server.log.1"), file("ray.log"))
    write(run_directory, file("server.log.before", b"1"), file("ray-logs/worker-a-01-7.out"))
    ended, lives = f"worker-b-01-{ended_pid()}", f"worker-c-01-{os.getpid()}"
    write(ray, file(f"{session}/{ended}.err"), file(f"{session}/{ended}.out.1"))
    write(ray, file(f"{session}/{lives}.out"), file(f"{session}/raylet.out"))
    for _ in range(2):
        answer("set_aside", directory=run_directory, ray_directory=ray, names=["server.log"])
        assert names(run_directory) == ["ray-logs.before", "ray.log", "server.log.before"]
        assert Path(run_directory, "server.log.before").read_bytes() == b"2"
        assert names(f"{run_directory}/ray-logs.before") == [
            "worker-a-01-7.out",
            f"{ended}.err",
            f"{ended}.out.1",
        ]
        assert names(f"{ray}/{session}") == ["raylet.out", f"{lives}.out"]


def ended_pid() -> int:
    """The number of a process that is no more."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def test_clear_removes_a_link_and_not_what_it_points_to(run_directory: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    write(run_directory, file("a"))
    Path(run_directory, "attest").symlink_to(tmp_path)
    Path(f"{run_directory}-ray").symlink_to(tmp_path)
    answer("clear", directory=run_directory, ray_directory=f"{run_directory}-ray", names=["attest"])
    assert precious.read_text() == "kept"
    assert names(run_directory) == ["a"]
    assert not os.path.lexists(f"{run_directory}-ray")


@pytest.mark.parametrize("name", ["../0", "..", ".", "", "a/b", "/etc/passwd"])
def test_clear_takes_names_only(run_directory: str, name: str) -> None:
    write(run_directory, file("a/b"))
    whole = ask(
        "clear", directory=run_directory, ray_directory=f"{run_directory}-ray", names=[name]
    )
    assert whole == {"error": f"{name!r} is not a name in a directory"}
    assert Path(run_directory, "a/b").exists()


# ---- facts -----------------------------------------------------------------------------------


def test_facts_of_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "ü"}')
    monkeypatch.setenv("HOME", str(tmp_path))
    with socket.create_server(("127.0.1.7", 0)) as server:
        taken = server.getsockname()[1]
        with socket.socket() as probe:
            probe.bind(("127.0.1.7", 0))
            free = probe.getsockname()[1]
        facts = answer("facts", address="127.0.1.7", model_path="~/model", ports=[taken, free])
    ((port, holder),) = facts["ports_taken"]
    assert (port, holder.partition(":")[0]) == (taken, f"pid {os.getpid()}")
    assert facts["ports_forbidden"] == []
    assert facts["uid"] == UID
    assert facts["hostname"] == socket.gethostname()
    assert facts["python"] == sys.executable
    assert facts["python_version"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["interface"] == "lo"
    assert ["lo", "127.0.0.1"] in facts["addresses"]
    assert facts["model_path"] == f"{tmp_path}/model"
    assert facts["model_config"] == '{"model_type": "ü"}'
    assert facts["versions"] == {"vllm": None, "ray": None, "torch": None}


def test_a_listener_on_every_address_takes_the_port() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        facts = answer("facts", address="127.0.1.7", model_path=None, ports=[port])
    assert [taken for taken, _ in facts["ports_taken"]] == [port]
    assert facts["model_path"] is None
    assert facts["model_config"] is None


def test_who_has_a_port_is_told_in_one_line_that_can_be_printed() -> None:
    script = (
        "import socket\nimport sys\ns = socket.create_server(('127.0.0.1', 0))\n"
        "print(s.getsockname()[1], flush=True); sys.stdin.read()  # \x1b[31m"
    )
    argv = [sys.executable, "-c", script]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        [[_, holder]] = answer("listeners", address="127.0.0.1", ports=[port])["taken"]
        server.kill()
    assert holder.startswith(f"pid {server.pid}: ")
    assert holder.isprintable()


def test_a_port_of_a_deployment_is_told_by_its_name() -> None:
    listen = "import socket; s = socket.create_server(('127.0.1.7', 0)); print(s.getsockname()[1])"
    serving = subprocess.Popen(
        [sys.executable, "-c", f"{listen}; import sys; sys.stdout.flush(); input()"],
        env={"MTPPP_DEPLOYMENT": "other"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with serving:
        assert serving.stdout is not None
        port = int(serving.stdout.readline())
        told = answer("listeners", address="127.0.1.7", ports=[port])
        serving.communicate(b"\n")
    assert told == {"taken": [[port, "deployment other"]]}
    assert answer("listeners", address="127.0.1.7", ports=[port]) == {"taken": []}


def test_an_address_that_the_host_does_not_have_takes_no_port() -> None:
    facts = answer("facts", address="192.0.2.1", model_path="/no/model", ports=[26300])
    assert facts["interface"] is None
    assert facts["ports_taken"] == []
    assert facts["model_path"] == "/no/model"
    assert facts["model_config"] is None


@as_root
@pytest.mark.skipif(
    int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) <= 80,
    reason="everybody may listen on port 80 here",
)
def test_a_port_that_only_root_may_have_is_forbidden_and_not_taken() -> None:
    request = {"op": "facts", "address": "127.0.1.7", "model_path": None, "ports": [80]}
    [whole] = ask_all([request], uid=STRANGER)
    assert whole["answer"]["ports_forbidden"] == [80]
    assert whole["answer"]["ports_taken"] == []
    assert whole["answer"]["user"] == str(STRANGER)


NVIDIA_SMI = """\
#!/bin/sh
[ "$*" = "--query-{asked} --format=csv,noheader,nounits" ] || exit 2
cat <<'LISTED'
{listed}
LISTED
"""
TYPES = """\
NVIDIA H100 80GB HBM3, 81559, 9.0
NVIDIA GB10, [N/A], 12.1"""


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Has the driver's program answer one question."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def answers(asked: str, listed: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(NVIDIA_SMI.format(asked=asked, listed=listed))
        program.chmod(0o755)

    return answers


def test_memory_in_use_on_each_gpu(nvidia_smi: Callable[[str, str], None]) -> None:
    assert answer("gpu_memory") == {"used": None, "reason": None}
    nvidia_smi("gpu=memory.used", "4\n70123")
    assert answer("gpu_memory") == {"used": [4 * 2**20, 70123 * 2**20], "reason": None}
    nvidia_smi("gpu=memory.used", "[N/A]")
    assert answer("gpu_memory")["reason"] == "the driver does not count this GPU's memory"
    nvidia_smi("gpu=something.else", "")
    assert answer("gpu_memory")["reason"].startswith("nvidia-smi failed: ")


def test_memory_that_a_deployment_holds(
    nvidia_smi: Callable[[str, str], None], run_directory: str
) -> None:
    def held() -> object:
        return answer("look", deployment=run_directory.split("/")[-2], node=0)["gpu_memory"]

    assert held() is None
    own = {"MTPPP_RUN_DIR": run_directory}
    with (
        subprocess.Popen(["sleep", "60"], env=own) as one,
        subprocess.Popen(["sleep", "60"], env=own) as other,
        subprocess.Popen(["sleep", "60"], env={"MTPPP_RUN_DIR": f"{run_directory}1"}) as foreign,
    ):
        assert held() is None, "no driver's program can say"
        rows = [(one, 7), (other, 5), (foreign, 100), (one, 1)]
        listed = [f"{process.pid}, {mebibytes}" for process, mebibytes in rows]
        nvidia_smi("compute-apps=pid,used_memory", "\n".join([*listed, f"{other.pid}, [N/A]"]))
        assert held() == 13 * 2**20
        for process in (one, other, foreign):
            process.kill()


def test_gpus_as_nvidia_smi_lists_them(nvidia_smi: Callable[[str, str], None]) -> None:
    nvidia_smi("gpu=name,memory.total,compute_cap", TYPES)
    facts = answer("facts", address="127.0.0.1", model_path=None, ports=[])
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert facts["gpus"] == [
        {"name": "NVIDIA H100 80GB HBM3", "memory": 81559 * 2**20, "compute_capability": "9.0"},
        {"name": "NVIDIA GB10", "memory": machine, "compute_capability": "12.1"},
    ]


def test_rdma_ports_and_the_gpus_they_are_near(tmp_path: Path) -> None:
    """As the kernel lays them out: two GPUs each with a port behind their own root port, one of
    them down; storage behind a third; Ethernet without a neighbour."""
    pci = tmp_path / "devices/pci0000:15"
    for at in ("0000:15:01.0/0000:16:00.0/0000:18:00.0", "0000:15:02.0/0000:28:00.0/0000:2a:00.0"):
        device = pci / at
        device.mkdir(parents=True)
        driver = tmp_path / "bus/pci/drivers/nvidia"
        driver.mkdir(parents=True, exist_ok=True)
        (driver / device.name).symlink_to(device)
    (driver / "module").mkdir()
    for name, at, state, link in (
        ("mlx5_0", "0000:15:02.0/0000:28:00.0/0000:2b:00.0", "4: ACTIVE", "InfiniBand"),
        ("mlx5_1", "0000:15:01.0/0000:16:00.0/0000:19:00.0", "1: DOWN", "InfiniBand"),
        ("mlx5_2", "0000:15:03.0/0000:30:00.0", "4: ACTIVE", "InfiniBand"),
        ("mlx5_3", "0000:15:04.0/0000:40:00.0", "4: ACTIVE", "Ethernet"),
    ):
        (pci / at).mkdir(parents=True)
        port = tmp_path / f"class/infiniband/{name}/ports/1"
        port.mkdir(parents=True)
        (port.parents[1] / "device").symlink_to(pci / at)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text(f"{link}\n")
    agent: dict[str, Any] = {}
    exec(AGENT.read_text().removesuffix("main()\n"), agent)
    found = {port.pop("device"): port for port in agent["_rdma_ports"](str(tmp_path))}
    infiniband = {"port": 1, "active": True, "link_layer": "InfiniBand"}
    assert {name: port["near"] for name, port in found.items()} == {
        "mlx5_0": [1],
        "mlx5_1": [0],
        "mlx5_2": [],
        "mlx5_3": [],
    }
    assert found["mlx5_0"] == infiniband | {"near": [1]}
    assert found["mlx5_1"] == infiniband | {"near": [0], "active": False}
    assert found["mlx5_3"] == infiniband | {"near": [], "link_layer": "Ethernet"}


def test_limits_are_raised_as_far_as_the_host_allows() -> None:
    ask_once = f"""
import resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 65536))
sys.exit(subprocess.run([sys.executable, "-I", "-c", {START!r}]).returncode)
"""
    request = {"op": "facts", "address": "127.0.0.1", "model_path": None, "ports": []}
    done = subprocess.run(
        [sys.executable, "-c", ask_once],
        input=f"{AGENT.read_text()!a}\n{json.dumps(request)}",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    limits = json.loads(done.stdout)["answer"]["limits"]
    assert limits == {"nofile": 4096, "memlock": 65536}


def test_addresses_without_the_program_that_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    facts = answer("facts", address="127.0.0.1", model_path=None, ports=[])
    assert ["lo", "127.0.0.1"] in facts["addresses"]
    assert facts["interface"] == "lo"


def test_the_agent_needs_nothing_but_ascii_to_travel() -> None:
    """Some locales read standard input in an encoding of their own."""
    request = json.dumps({"op": "uid"})
    done = subprocess.run(
        [sys.executable, "-I", "-c", START],
        input=f"{AGENT.read_text()!a}\n{request}".encode("ascii"),
        env={"PYTHONIOENCODING": "ascii", "PATH": os.environ["PATH"]},
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == {"answer": {"uid": UID}}


def test_weights_are_known_by_their_headers(tmp_path: Path) -> None:
    def weights() -> dict[str, Any]:
        answer: dict[str, Any] = ask("weights", path=str(tmp_path), hub=None)["answer"]
        return answer

    assert weights() == {"files": 0, "bytes": 0, "sha256": "", "config": None}
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    for number in (1, 2):
        data = len(header).to_bytes(8, "little") + header + bytes([number] * 4)
        (tmp_path / f"model-{number}.safetensors").write_bytes(data)
    (tmp_path / "config.json").write_text('{"model_type": "demo"}')
    first = weights()
    assert (first["files"], first["bytes"]) == (2, 2 * (8 + len(header) + 4))
    assert first["config"] == {"model_type": "demo"}
    assert weights() == first
    renamed = header.replace(b'"a"', b'"b"')
    (tmp_path / "model-2.safetensors").write_bytes(
        len(renamed).to_bytes(8, "little") + renamed + bytes([2] * 4)
    )
    assert weights()["sha256"] != first["sha256"]
    assert weights()["bytes"] == first["bytes"]
