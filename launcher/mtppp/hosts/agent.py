"""Runs on a node: reads one JSON request on standard input, answers with one JSON object.

The source of this file is sent along with every request and executed by the node's own python,
so nothing is installed and no old version can linger. Standard library only, Python 3.9 or newer.

Requests travel on standard input because the environment of a process may hold secrets, and a
command line can be read by every user of the machine. A request is one line, `{"op": name, ...}`;
the functions named `op_*` below are the operations, their parameters the request's other keys.
With `lock` and `token` in it, it is carried out only while that lock is held by that token.

Ownership: every process that mtppp starts has `MTPPP_RUN_DIR=<its run directory>` in its
environment, inherited by all its descendants. That mark, not a name or a process group, says
what belongs to a deployment: Ray's workers leave the group of the raylet that forked them.
"""

from __future__ import annotations

import base64
import calendar
import errno
import fcntl
import glob
import hashlib
import importlib.metadata
import json
import os
import platform
import pwd
import re
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

MARK = "MTPPP_RUN_DIR"
DEPLOYMENT = "MTPPP_DEPLOYMENT"
PROCESSES = "processes.json"
AUDIT_LOG = "audit.log"
# Seconds without a sign of life from who holds a lock after which it is given up. The launcher
# takes a silent connection for lost sooner than that.
SILENCE = 90.0
TIME = "%Y-%m-%dT%H:%M:%SZ"
# What we make is for nobody else; what we start makes its files as in a login.
_UMASK = os.umask(0o077)
# What a started process keeps of the login environment; everything else comes from the Plan, so
# that a variable in somebody's shell profile cannot make one node differ from another.
KEPT = frozenset(
    "PATH HOME USER LOGNAME SHELL LANG LC_ALL TZ TMPDIR LD_LIBRARY_PATH CUDA_HOME"
    " HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy"
    " SSL_CERT_FILE REQUESTS_CA_BUNDLE OPENBLAS_CORETYPE".split()
)


ENOUGH_FILES = 1 << 20
LIMITS = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK}


# ---- facts ---------------------------------------------------------------------------------


def op_facts(
    address: str, model_path: str | None, ports: Sequence[int], hub: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Everything the launcher must know of a node before it plans or changes anything.

    A model is a path, or one of a hub: `hub` is then its `model`, `revision` and the `cache`.
    """
    return {
        "hostname": socket.gethostname(),
        "user": _user(),
        "uid": os.getuid(),
        "path": os.environ.get("PATH", os.defpath),
        "python": sys.executable,
        "python_version": platform.python_version(),
        "versions": {name: _version(name) for name in ("vllm", "ray", "torch")},
        "interface": _interface_of(address),
        "addresses": sorted(_addresses()),
        "gpus": _gpus(),
        "rdma": list(_rdma_ports()),
        "limits": {name: _limit(name) for name in LIMITS},
        "deployments": _deployments(),
        "ports_taken": _taken(address, ports),
        "ports_forbidden": [p for p in ports if _bind_error(address, p) == errno.EACCES],
        "shm_bytes": shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
        "model_path": None if model_path is None else os.path.expanduser(model_path),
        "model_config": (
            _cached_config(**hub) if hub else _model_config(model_path) if model_path else None
        ),
    }


def op_uid() -> dict[str, Any]:
    return {"uid": os.getuid()}


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _addresses() -> Iterator[tuple[str, str]]:
    """(interface, address) of this node, IPv4 and IPv6, by asking `ip`; else only by the kernel's
    IPv4 ioctl, which needs no program."""
    try:
        shown = subprocess.run(
            ["ip", "-j", "address", "show"], capture_output=True, check=True, timeout=20
        ).stdout
        for link in json.loads(shown):
            for entry in link.get("addr_info", []):
                yield link["ifname"], entry["local"]
    except (OSError, subprocess.SubprocessError, ValueError):
        yield from _ipv4_addresses()


def _ipv4_addresses() -> Iterator[tuple[str, str]]:
    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), siocgifaddr, request)
            except OSError:
                continue
            yield name, socket.inet_ntoa(answer[20:24])


def _interface_of(address: str) -> str | None:
    for name, held in _addresses():
        if held == address:
            return name
    # All of 127.0.0.0/8 belongs to the loopback interface though only 127.0.0.1 is listed.
    return "lo" if address.startswith("127.") else None


def _gpus() -> list[dict[str, Any]]:
    """Name, memory in bytes and compute capability of each GPU the driver shows.

    A GPU that shares the machine's memory shows none of its own: it has the machine's.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        listed = _nvidia_smi("--query-gpu=name,memory.total,compute_cap")
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in listed:
        name, mebibytes, capability = (part.strip() for part in line.rsplit(",", 2))
        memory = int(mebibytes) * 2**20 if mebibytes.isdigit() else machine
        found.append({"name": name, "memory": memory, "compute_capability": capability})
    return found


def _rdma_ports(sysfs: str = "/sys") -> Iterator[dict[str, Any]]:
    """Ports of InfiniBand and RoCE, and which GPUs each is near: below the same PCIe root port."""
    gpus = [_bridges(path) for path in sorted(glob.glob(sysfs + "/bus/pci/drivers/nvidia/*:*"))]
    for path in sorted(glob.glob(sysfs + "/class/infiniband/*/ports/*")):
        device = os.path.dirname(os.path.dirname(path))
        above = _bridges(os.path.join(device, "device"))
        yield {
            "device": os.path.basename(device),
            "port": int(os.path.basename(path)),
            "active": _tail(os.path.join(path, "state"), 100).strip().endswith("ACTIVE"),
            "link_layer": _tail(os.path.join(path, "link_layer"), 100).strip(),
            "near": [i for i, bridges in enumerate(gpus) if bridges & above],
        }


def _bridges(path: str) -> frozenset[str]:
    """The PCI devices above one, of /sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0 the second
    from the right."""
    parts = os.path.realpath(path).split("/")[:-1]
    return frozenset(part for part in parts if part.count(":") == 2 and "." in part)


def _limit(name: str) -> int | None:
    """What a process started here may have; None: no limit."""
    soft = resource.getrlimit(LIMITS[name])[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _raise_limits() -> None:
    """As far as the node allows; what is started inherits it."""
    for name, number in LIMITS.items():
        _, hard = resource.getrlimit(number)
        is_endless = name == "nofile" and not 0 <= hard <= ENOUGH_FILES
        try:
            resource.setrlimit(number, (ENOUGH_FILES if is_endless else hard, hard))
        except (OSError, ValueError):  # a container may forbid what the limit allows
            continue


def op_gpu_memory() -> dict[str, Any]:
    """`used`: bytes in use on each GPU; None with a `reason` where that cannot be read.

    Both are None on a node without GPUs, or without their driver's program.
    """
    try:
        listed = _nvidia_smi("--query-gpu=memory.used")
    except FileNotFoundError:
        return {"used": None, "reason": None}
    except (OSError, subprocess.SubprocessError) as error:
        return {"used": None, "reason": "nvidia-smi failed: %s" % error}
    if not all(line.isdigit() for line in listed):
        return {"used": None, "reason": "the driver does not count this GPU's memory"}
    return {"used": [int(line) * 2**20 for line in listed], "reason": None}


def _gpu_memory_of(pids: Iterable[int]) -> int | None:
    """Bytes of GPU memory that these processes hold; None where nobody can say."""
    try:
        listed = _nvidia_smi("--query-compute-apps=pid,used_memory")
    except (OSError, subprocess.SubprocessError):
        return None
    held = dict.fromkeys(map(str, pids), 0)
    for line in listed:
        pid, _, mebibytes = line.partition(", ")
        if pid in held and mebibytes.isdigit():
            held[pid] += int(mebibytes) * 2**20
    return sum(held.values())


def _nvidia_smi(query: str) -> list[str]:
    done = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"],
        capture_output=True,
        check=True,
        timeout=60,
    )
    return [line.strip() for line in done.stdout.decode().splitlines()]


def op_listeners(address: str, ports: Sequence[int]) -> dict[str, Any]:
    """`taken`: those of the ports on which something listens, as [port, who]."""
    return {"taken": _taken(address, ports)}


def _taken(address: str, ports: Sequence[int]) -> list[tuple[int, str]]:
    taken = [port for port in ports if _bind_error(address, port) == errno.EADDRINUSE]
    return [(port, _listener(port)) for port in taken]


def _listener(port: int) -> str:
    """Who listens on a port, as far as we may know: a deployment, or a process."""
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as f:
                rows = [line.split() for line in f][1:]
        except OSError:
            continue
        inodes.update(r[9] for r in rows if r[3] == "0A" and r[1].endswith(":%04X" % port))
    sockets = {"socket:[%s]" % inode for inode in inodes}
    for descriptor in glob.glob("/proc/[0-9]*/fd/*"):
        try:
            if os.readlink(descriptor) not in sockets:
                continue
        except OSError:
            continue
        pid = int(descriptor.split("/")[2])
        ours = _variable(pid, DEPLOYMENT)
        return "deployment %s" % ours if ours else "pid %d: %s" % (pid, _command(pid)[:60])
    return "a process of another user" if inodes else "not listening, but in use"


def _bind_error(address: str, port: int) -> int:
    """Why a server could not listen there, as errno has it; 0 when it could."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do; without it a port in TIME_WAIT would count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            # A listener on the wildcard address lets a bind to one address pass on some kernels
            # only until it listens.
            probe.listen(1)
        except OSError as error:
            return error.errno or errno.EIO
    return 0


def _model_config(path: str) -> str | None:
    """The text of PATH/config.json; None when there is none."""
    try:
        with open(os.path.join(os.path.expanduser(path), "config.json"), encoding="utf-8") as f:
            return f.read()
    except (OSError, UnicodeDecodeError):
        return None


def _cached_config(model: str, revision: str, cache: str) -> str | None:
    """The config.json that vLLM finds in this node's cache of the hub; None before a download."""
    return _model_config(_cached(model, revision, cache))


def _cached(model: str, revision: str, cache: str) -> str:
    """Where a model of a hub is in this node's cache."""
    store = os.path.join(os.path.expanduser(cache), "models--" + model.replace("/", "--"))
    commit = _tail(os.path.join(store, "refs", revision), 100).strip() or revision
    return os.path.join(store, "snapshots", commit)


def op_weights(path: str | None, hub: Mapping[str, str] | None) -> dict[str, Any]:
    """What a model's weights are, without reading all of them.

    `sha256` is of name, size and header of each safetensors file: the header has name, type, shape
    and place of each tensor. Other numbers in the same places have the same one.
    """
    directory = _cached(**hub) if hub else os.path.expanduser(path or "")
    digest, total = hashlib.sha256(), 0
    files = sorted(glob.glob(os.path.join(glob.escape(directory), "*.safetensors")))
    for name in files:
        with open(name, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            beginning = f.read(8)
            header = f.read(min(size, int.from_bytes(beginning, "little")))
        digest.update(b"%s %d " % (os.path.basename(name).encode(), size) + beginning + header)
        total += size
    return {
        "files": len(files),
        "bytes": total,
        "sha256": digest.hexdigest() if files else "",
        "config": _json(os.path.join(directory, "config.json")),
    }


# ---- files ---------------------------------------------------------------------------------


def _require_own(path: str) -> None:
    """Refuse a path that is not below mtppp's own directory, and a directory that is not ours.

    Everybody may write to /var/tmp: somebody else could have made our directory there first, or a
    link of its name, and would then decide what runs as us. Below a directory that nobody else can
    change nothing needs a look.
    """
    root = _root()
    if not path.startswith(root + "/") or os.path.normpath(path) != path:
        raise AgentError("%s is not a path of mtppp's" % path)
    try:
        held = os.lstat(root)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(held.st_mode):
        raise AgentError("%s is not a directory; somebody may have put it there: remove it" % root)
    if held.st_uid != os.getuid():
        raise AgentError("%s belongs to user %d: have it removed" % (root, held.st_uid))
    if held.st_mode & 0o022:
        raise AgentError("others can write to %s: check what is in it and remove it" % root)


def op_write(directory: str, files: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Write files below `directory`, each `{"path", "data" (base64), "mode"}`, whole or not."""
    _require_own(directory)
    os.makedirs(directory, exist_ok=True)
    # Once more: what is there now may have been made between the first look and our attempt.
    _require_own(directory)
    for file in files:
        path = os.path.join(directory, file["path"])
        if not os.path.normpath(path).startswith(directory + "/"):
            raise AgentError("%s is not below %s" % (path, directory))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        _replace(path, base64.b64decode(file["data"]), file["mode"])
    return {}


def _replace(path: str, data: bytes, mode: int) -> None:
    temporary = "%s.%d" % (path, os.getpid())
    with open(temporary, "wb") as f:
        try:
            os.fchmod(f.fileno(), mode)
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


def op_exists(path: str) -> dict[str, Any]:
    _require_own(path)
    return {"exists": os.path.exists(path)}


def op_read(pattern: str, limit: int) -> dict[str, Any]:
    """The files that match a glob, as `{path: text}`; of a longer file the last `limit` bytes."""
    _require_own(pattern)
    return {"files": {path: _tail(path, limit) for path in sorted(glob.glob(pattern))}}


def _tail(path: str, limit: int) -> str:
    try:
        with open(path, "rb") as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - limit))
            return f.read(limit).decode("utf-8", "replace")
    except OSError:
        return ""


def op_clear(directory: str, ray_directory: str | None, names: Sequence[str]) -> dict[str, Any]:
    """After the processes have ended: remove these names from a run directory, and Ray's temp-dir,
    if that is given.

    Ray's logs are moved into the run directory, for whoever asks why it failed.
    """
    _require_own(directory)
    for name in names:
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise AgentError("%r is not a name in a directory" % name)
    if ray_directory is not None:
        _clear_ray(directory, ray_directory)
    for name in names:
        _remove(os.path.join(directory, name))
    return {}


def _clear_ray(directory: str, ray_directory: str) -> None:
    _require_own(ray_directory)
    sessions = sorted(glob.glob(os.path.join(ray_directory, "session_2*", "logs")))
    if sessions and os.path.isdir(directory):
        kept = os.path.join(directory, RAY_LOGS)
        _remove(kept)
        shutil.move(sessions[-1], kept)
    _remove(ray_directory)


def op_set_aside(directory: str, ray_directory: str, names: Sequence[str]) -> dict[str, Any]:
    """Before a launch: have the logs in a run directory be those of the launch before, so that
    what is found without that ending is the new one's.

    `LOG` becomes `LOG.before`, and so do Ray's. Where a Ray lives on in `ray_directory`, what its
    workers wrote that have ended goes there, too.
    """
    _require_own(directory)
    _require_own(ray_directory)
    for path in [os.path.join(directory, name) for name in (*names, RAY_LOGS)]:
        _remove(path + OLDER)
        if os.path.lexists(path):
            _remove(path + BEFORE)
            os.replace(path, path + BEFORE)
    for path in glob.glob(os.path.join(ray_directory, "session_2*", "logs", "worker-*")):
        writer = _WRITER.search(path)
        if writer and _start_time(int(writer[1])) is None:
            kept = os.path.join(directory, RAY_LOGS + BEFORE)
            os.makedirs(kept, exist_ok=True)
            shutil.move(path, os.path.join(kept, os.path.basename(path)))
    return {}


def _remove(path: str) -> None:
    """Remove a file, a link or a directory with all that is in it; it need not exist."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


# ---- processes -----------------------------------------------------------------------------


def op_start(
    role: str, argv: Sequence[str], env: dict[str, str], directory: str, log: str, logs: str = ""
) -> dict[str, Any]:
    """Start a long-lived process that outlives this session, and record it in the run directory.

    The record is written before the answer is given: a launcher that dies in between leaves
    nothing unknown. The log of the process's predecessor is kept as `LOG.before`. This one is kept
    bounded, and so are those that the glob `logs` finds; see `_keep_bounded`.
    """
    _require_own(directory)
    path = os.path.join(directory, log)
    _remove(path + OLDER)
    if os.path.exists(path):
        os.replace(path, path + BEFORE)
    with open(path, "ab") as out:
        started = subprocess.Popen(
            argv,
            env=_environment(env),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=_UMASK,
        )
    entry = {
        "role": role,
        "pid": started.pid,
        "started": _start_time(started.pid),
        "log": path,
    }
    _record(directory, _recorded(directory) + [entry])
    _keep_bounded(entry, [path, logs])
    return entry


def op_run(
    argv: Sequence[str], env: dict[str, str], directory: str, timeout: float
) -> dict[str, Any]:
    """Run a command to its end; its environment is not seen on any command line.

    After `timeout` seconds it is killed, with all that stayed in its process group.
    """
    _require_own(directory)
    running = subprocess.Popen(
        argv,
        env=_environment(env),
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        umask=_UMASK,
    )
    with running:
        try:
            out, err = running.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as expired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            out, err = expired.stdout or b"", expired.stderr or b""
            return {"status": None, "stdout": _text(out), "stderr": _text(err)}
    return {"status": running.returncode, "stdout": _text(out), "stderr": _text(err)}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _environment(planned: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in KEPT}
    return dict(kept, **planned)


def op_look(deployment: str, node: int) -> dict[str, Any]:
    """All that this node knows of a deployment: its records, and what of it is alive."""
    directory = _run_directory(deployment, node)
    _require_own(directory)
    marked = _marked(directory)
    attested = []
    for path in sorted(glob.glob(os.path.join(directory, "attest", "rank-*.json"))):
        record = _json(path)
        if isinstance(record, dict) and isinstance(record.get("rank"), int):
            attested.append(dict(record, alive=record.get("pid") in marked))
    return {
        "uid": os.getuid(),
        "directory": directory,
        "recorded": [dict(entry, alive=_is_alive(entry)) for entry in _recorded(directory)],
        "marked": len(marked),
        "suspended": [
            {"pid": pid, "command": _command(pid)} for pid in marked if _state(pid) == "T"
        ],
        "launch": _json(os.path.join(directory, "launch.json")),
        "checked": _json(os.path.join(directory, "checked.json")),
        "plan": _json(os.path.join(directory, "plan.json")),
        "attested": attested,
        "invariants": _json(os.path.join(directory, "invariants.json")),
        "gate": {
            "key": _contents(os.path.join(directory, "gate-key")),
            "server": _json(os.path.join(directory, "gate-server.json")),
            "opened": _json(os.path.join(directory, "gate-open.json")),
        },
        "held_by": holder_of("%s.%d" % (deployment, node)),
        "gpu_memory": _gpu_memory_of(marked) if marked else None,
    }


def _deployments() -> list[dict[str, Any]]:
    """The deployments of which anything runs, or is being launched, here, as far as we may see."""
    directories = set()
    for name in os.listdir("/proc"):
        directory = _variable(int(name), MARK) if name.isdigit() else None
        # What makes a managed environment has a directory of its own below that of its node.
        if directory and directory.split("/")[-1].isdigit() and not _is_zombie(int(name)):
            directories.add(directory)
    for path in glob.glob(os.path.join(_root(), "*", "*", "launch.json")):
        directory = os.path.dirname(path)
        deployment, node = directory.split("/")[-2:]
        if holder_of("%s.%s" % (deployment, node)):
            directories.add(directory)
    found = []
    for directory in sorted(directories):
        plan = _json(os.path.join(directory, "plan.json"))
        launch = _json(os.path.join(directory, "launch.json"))
        found.append(
            {
                "directory": directory,
                "device": plan.get("device") if isinstance(plan, dict) else None,
                "by": launch.get("by", "") if isinstance(launch, dict) else "",
                "since": launch.get("since", "") if isinstance(launch, dict) else "",
            }
        )
    return found


def _json(path: str) -> Any:
    """What a file holds; None when it is not there, or damaged."""
    try:
        with open(path, encoding="utf-8") as f:
            return json.load(f)
    except (OSError, ValueError):
        return None


def _contents(path: str) -> str:
    """The text of a file; "" when it is not there."""
    try:
        with open(path, encoding="utf-8") as f:
            return f.read().strip()
    except (OSError, ValueError):
        return ""


def _root() -> str:
    return "/var/tmp/mtppp-%d" % os.getuid()


def _run_directory(deployment: str, node: int) -> str:
    return "%s/%s/%d" % (_root(), deployment, node)


def op_processes(directory: str) -> dict[str, Any]:
    """What runs here for a run directory: what was recorded, and all that bears its mark."""
    _require_own(directory)
    marked = _marked(directory)
    recorded = [dict(entry, alive=_is_alive(entry)) for entry in _recorded(directory)]
    return {
        "recorded": recorded,
        "marked": [{"pid": pid, "command": _command(pid)} for pid in marked],
        "shared_memory": _shared_memory(marked),
    }


def op_stop(
    directory: str, grace: Mapping[str, float], segments_file: str, keep: Sequence[str] = ()
) -> dict[str, Any]:
    """End all that belongs to a run directory; then its shared memory.

    A recorded process whose role is in `grace` gets SIGTERM and so many seconds to end what it
    has begun. Everything else is killed at once: nothing of its state is kept. A file in the run
    directory may list further segments known to be ours, of processes that died before.

    Recorded processes whose role is in `keep` live on, with all in their process groups: of Ray
    that is what it consists of, and not the workers that run in it. Records are then of them alone.
    """
    _require_own(directory)
    owned = _owned(directory, keep)
    running = len(owned)
    # A process that is ending has no environment any more, and still ports, files and GPU memory.
    seen = {pid: _start_time(pid) for pid in owned}
    segments = {*_listed(os.path.join(directory, segments_file)), *_shared_memory(owned)}
    for entry in _recorded(directory):
        if entry["role"] in grace and _is_alive(entry):
            _signal(entry["pid"], signal.SIGTERM)
            _wait_until(partial(_has_ended, entry), grace[entry["role"]])
    killed: dict[int, str] = {}
    deadline = time.monotonic() + 20
    while True:
        owned = _owned(directory, keep)
        segments.update(_shared_memory(owned))
        seen.update((pid, _start_time(pid)) for pid in owned if pid not in seen)
        living = [pid for pid, started in seen.items() if not _is_gone(pid, started)]
        if not living or time.monotonic() > deadline:
            break
        killed.update((pid, _command(pid)) for pid in owned if pid not in killed)
        for pid in owned:
            _signal(pid, signal.SIGKILL)
        _wait_until(lambda: all(_is_gone(pid, started) for pid, started in seen.items()), 2)
    if keep:
        _record(directory, [entry for entry in _recorded(directory) if _is_alive(entry)])
    return {
        "running": running,
        "killed": list(killed.values()),
        "left": [{"pid": pid, "command": _command(pid)} for pid in living],
        "unlinked": _unlink(segments),
    }


def _owned(directory: str, keep: Sequence[str] = ()) -> list[int]:
    """The live processes of a run directory: those that bear its mark, and those recorded, even if
    one of these has overwritten its environment; without the process groups of the roles in `keep`.
    """
    recorded = [entry for entry in _recorded(directory) if _is_alive(entry)]
    kept = {entry["pid"] for entry in recorded if entry["role"] in keep}
    owned = {*_marked(directory), *(entry["pid"] for entry in recorded)}
    return sorted(pid for pid in owned if not kept or _group(pid) not in kept)


def _recorded(directory: str) -> list[dict[str, Any]]:
    try:
        with open(os.path.join(directory, PROCESSES), encoding="utf-8") as f:
            entries: list[dict[str, Any]] = json.load(f)
    except (FileNotFoundError, ValueError):
        # Damaged, it is worth as little as none: what runs is known by its mark as well.
        return []
    return entries


def _record(directory: str, entries: Sequence[dict[str, Any]]) -> None:
    _replace(os.path.join(directory, PROCESSES), json.dumps(entries, indent=1).encode(), 0o600)


def _start_time(pid: int) -> int | None:
    """Clock ticks between boot and the start of a process: with its number, its identity."""
    try:
        with open("/proc/%d/stat" % pid, encoding="ascii", errors="replace") as f:
            # The command name, in parentheses, may hold spaces and parentheses itself.
            return int(f.read().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def _group(pid: int) -> int | None:
    """The process group; None when there is no such process."""
    try:
        return os.getpgid(pid)
    except OSError:
        return None


def _is_zombie(pid: int) -> bool:
    return _state(pid) in ("Z", None)


def _state(pid: int) -> str | None:
    """One letter, as ps has it; None when there is no such process."""
    try:
        with open("/proc/%d/stat" % pid, encoding="ascii", errors="replace") as f:
            return f.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def _is_gone(pid: int, started: int | None) -> bool:
    """Whether nothing is left of a process, or nothing but its exit status."""
    if started is None or _start_time(pid) != started:
        return True
    try:
        threads = os.listdir("/proc/%d/task" % pid)
    except OSError:
        return True
    # The first thread may have ended before others, which hold what the process had.
    return _is_zombie(pid) and len(threads) < 2


def _is_alive(entry: dict[str, Any]) -> bool:
    pid = entry["pid"]
    return (
        entry["started"] is not None
        and _start_time(pid) == entry["started"]
        and not _is_zombie(pid)
    )


def _has_ended(entry: dict[str, Any]) -> bool:
    return not _is_alive(entry)


def _marked(directory: str) -> list[int]:
    """Numbers of the live processes that have the run directory in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        if _variable(int(name), MARK) == directory and not _is_zombie(int(name)):
            found.append(int(name))
    return found


def _variable(pid: int, name: str) -> str | None:
    """A variable of a process's environment; None when it has none, or it is not ours to see."""
    begin = name.encode() + b"="
    try:
        with open("/proc/%d/environ" % pid, "rb") as f:
            for entry in f.read().split(b"\0"):
                if entry.startswith(begin):
                    return entry[len(begin) :].decode("utf-8", "replace")
    except OSError:
        pass
    return None


def _command(pid: int) -> str:
    """The command line of a process, as one line of what can be printed."""
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as f:
            text = f.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:200]


def _shared_memory(pids: Iterable[int]) -> list[str]:
    """Segments in /dev/shm that these processes have mapped or open."""
    found = set()
    for pid in pids:
        try:
            with open("/proc/%d/maps" % pid, encoding="utf-8", errors="replace") as f:
                for line in f:
                    path = line.split(None, 5)[-1].strip()
                    if path.startswith("/dev/shm/"):
                        found.add(path)
        except OSError:
            continue
        for descriptor in glob.glob("/proc/%d/fd/*" % pid):
            try:
                path = os.readlink(descriptor)
            except OSError:
                continue
            if path.startswith("/dev/shm/"):
                found.add(path)
    return sorted(path for path in found if not path.endswith(" (deleted)"))


def _listed(path: str) -> Iterator[str]:
    """The segments in a file, a JSON list; none when it is not there or was cut off by a crash."""
    try:
        with open(path, encoding="utf-8") as f:
            listed = json.load(f)
    except (OSError, ValueError):
        return
    for segment in listed:
        if segment.startswith("/dev/shm/") and os.path.normpath(segment) == segment:
            yield segment


def _unlink(paths: Iterable[str]) -> list[str]:
    """Remove segments that no process maps any more. One that is ending has no command line."""
    paths = set(paths)
    if not paths:
        return []
    everybody = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    in_use = set(_shared_memory(filter(_command, everybody)))
    removed = []
    for path in sorted(paths):
        if path in in_use:
            continue
        try:
            os.unlink(path)
        except OSError:
            continue
        removed.append(path)
    return removed


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:  # it has ended, or has become another user's: who calls looks again
        pass


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


# ---- the lock ------------------------------------------------------------------------------

# The descriptor of the lock that this process holds, and its holder.
_held: list[tuple[int, dict[str, Any]]] = []


def op_hold(
    lock: str, holder: dict[str, Any], resume: bool, claim: str | None = None
) -> dict[str, Any]:
    """Take a lock. This process then holds it until its input ends: a lock is never stale.

    `holder` has `who`, `what`, `deployment`, `node`, and a `token` that nobody else has. To resume
    is to take a lock again that was lost with the connection; only when nobody had it in between.
    `claim` is a further lock, of what deployments of any name must not have together; those who
    share the token have it together. The answer's `held_by` is whoever else has, or had, it, and
    `claimed` whether it is the further one; None when both were taken.
    """
    if claim is not None:
        other = _claim(claim, holder)
        if other is not None:
            return {"held_by": other, "claimed": True}
    _require_own(_lock_path(lock))
    os.makedirs(os.path.dirname(_lock_path(lock)), exist_ok=True)
    _require_own(_lock_path(lock))
    descriptor = os.open(_lock_path(lock), os.O_RDWR | os.O_CREAT, 0o600)
    # Whoever looks whether it is held has it for a moment, too.
    if not _try_lock(descriptor, fcntl.LOCK_EX, 1.0):
        os.close(descriptor)
        return {"held_by": _last_holder(lock)}
    last = _last_holder(lock)
    if resume and (last or {}).get("token") != holder["token"]:
        os.close(descriptor)
        return {"held_by": last}
    if not resume:
        holder = dict(holder, since=_now())
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        _audit(holder, "begun")
    _held.append((descriptor, holder))
    return {"held_by": None}


def _claim(lock: str, holder: dict[str, Any]) -> dict[str, Any] | None:
    """Take a further lock, for as long as this process lives; who else has it, or None."""
    _require_own(_lock_path(lock))
    os.makedirs(os.path.dirname(_lock_path(lock)), exist_ok=True)
    descriptor = os.open(_lock_path(lock), os.O_RDWR | os.O_CREAT, 0o600)
    # Whoever has just taken it, or only looks, is not yet known.
    for _ in range(20):
        if _try_lock(descriptor, fcntl.LOCK_EX, 0.05):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(dict(holder, since=_now())).encode(), 0)
            return None
        if (_last_holder(lock) or {}).get("token") == holder["token"]:
            return None
    return _last_holder(lock)


def _stay() -> None:
    """Hold the lock until standard input ends; its last line says how the matter ended."""
    descriptor, holder = _held[0]
    said = b""
    while select.select([0], [], [], SILENCE)[0]:
        heard = os.read(0, 1 << 16)
        if not heard:
            break
        said = (said + heard).lstrip(b"\n")
    outcome = said.decode("utf-8", "replace").strip()
    _audit(holder, outcome or "contact with who did it was lost")
    os.close(descriptor)


def holder_of(lock: str) -> dict[str, Any] | None:
    """Who holds a lock now, and for how many seconds; None when nobody does."""
    try:
        descriptor = os.open(_lock_path(lock), os.O_RDWR)
    except OSError:
        return None
    try:
        if _try_lock(descriptor, fcntl.LOCK_SH, 0.0):
            return None
    finally:
        os.close(descriptor)
    return _last_holder(lock)


def _last_holder(lock: str) -> dict[str, Any] | None:
    try:
        with open(_lock_path(lock), encoding="utf-8") as f:
            holder: dict[str, Any] = json.load(f)
        since = calendar.timegm(time.strptime(holder["since"], TIME))
    except (OSError, ValueError, KeyError, TypeError):
        # Taken this very moment, or cut off by a crash.
        return {"who": "somebody", "what": "work", "since": _now(), "seconds": 0, "token": ""}
    return dict(holder, seconds=max(0, int(time.time()) - since))


def _try_lock(descriptor: int, kind: int, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        else:
            return True


def _lock_path(lock: str) -> str:
    return "%s/locks/%s" % (_root(), lock)


def _now() -> str:
    return time.strftime(TIME, time.gmtime())


def _audit(holder: Mapping[str, Any], outcome: str) -> None:
    """Add a line to the node's audit log: who did what to which deployment, and how it ended."""
    line = {"at": _now()}
    line.update((key, holder[key]) for key in ("who", "what", "deployment", "node"))
    line["outcome"] = outcome
    descriptor = os.open(
        os.path.join(_root(), AUDIT_LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
    )
    try:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
    finally:
        os.close(descriptor)


# ---- logs ----------------------------------------------------------------------------------

LOG_BYTES = 64 << 20
LOG_PAUSE = 1.0  # seconds between two looks at the sizes
OLDER = ".1"
BEFORE = ".before"  # behind the name of a log, or of all of Ray's: those of the launch before
RAY_LOGS = "ray-logs"
_WRITER = re.compile(r"-(\d+)\.(?:out|err)[^/]*$")  # the process that a log of Ray's workers is of
# What vLLM, Ray and torch write at the beginning of a line or behind a process's name.
_TIMES = re.compile(
    r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<vllm>\d\d-\d\d \d\d:\d\d:\d\d) \["
    r"|^\[?(?P<ray>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(?P<milli>\d{3})"
    r"|^\[[IWEF](?P<torch>\d{4} \d\d:\d\d:\d\d)\.(?P<nano>\d+)"
)
_ESCAPES = re.compile("\x1b\\[[0-9;]*[A-Za-z]")


def _keep_bounded(entry: dict[str, Any], patterns: Sequence[str]) -> None:
    """Keep the logs that match within bounds until a process ends, from a process of its own.

    Whoever writes a log has it open, and appends: what is older is copied away and cut off. No pipe
    stands in between, which would end or block the writer when its reader died; when this process
    dies, the logs grow on.
    """
    if os.fork():
        return
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        while not _ends_within(entry, LOG_PAUSE):
            for path in [path for pattern in patterns for path in glob.glob(pattern)]:
                _cut_off(path)
    finally:
        os._exit(0)


def _ends_within(entry: dict[str, Any], seconds: float) -> bool:
    try:
        descriptor = os.pidfd_open(entry["pid"])
    except (AttributeError, OSError):  # python or kernel are too old, or it has ended
        time.sleep(seconds)
        return not _is_alive(entry)
    try:
        return bool(select.select([descriptor], [], [], seconds)[0]) or not _is_alive(entry)
    finally:
        os.close(descriptor)


def _cut_off(path: str) -> None:
    """Move the contents of a log that has grown beyond the bound to `PATH.1`.

    What is written between the last look and the cut is lost: a matter of microseconds.
    """
    try:
        # Blocks and not length: cut off under a writer that does not append, a file has a hole.
        if os.stat(path).st_blocks * 512 <= LOG_BYTES:
            return
        with open(path, "r+b") as log, open(path + OLDER, "wb") as older:
            shutil.copyfileobj(log, older, 1 << 20)
            log.truncate(0)
    except OSError:  # it has gone, or the disk is full: look again
        pass


def op_logs(
    directory: str,
    ray_directory: str,
    names: Sequence[str],
    since: float,
    limit: int,
    positions: Mapping[str, Sequence[int]],
) -> dict[str, Any]:
    """Lines of this node's logs, of each at most the last `limit` bytes, from `since` on.

    Args:
        names: of logs in the run directory. Those of Ray's workers are read from Ray's directory,
            or from where `clear` has moved them.
        since: seconds since the epoch.
        positions: of an answer before: then only what has come since.

    Returns:
        logs: `[{"path", "lines": [[time, text], ...], "left_out": bytes}]`; lines without a time
            of their own have that of the line before.
        positions: to ask with for what comes next.
    """
    _require_own(directory)
    _require_own(ray_directory)
    workers = glob.glob(os.path.join(ray_directory, "session_2*", "logs", "worker-*"))
    workers = workers or glob.glob(os.path.join(directory, RAY_LOGS, "worker-*"))
    paths = [os.path.join(directory, name) for name in names] + sorted(workers)
    answer: dict[str, Any] = {"logs": [], "positions": {}}
    for path in [path for path in paths if not path.endswith(OLDER)]:
        try:
            data, position, left_out = _news(path, positions.get(path), limit, bool(positions))
        except OSError:  # it is not there (yet)
            continue
        answer["positions"][path] = position
        lines = [line for line in _timed(path, data) if line[0] >= since]
        if lines:
            answer["logs"].append({"path": path, "lines": lines, "left_out": left_out})
    return answer


def _news(
    path: str, position: Sequence[int] | None, limit: int, following: bool
) -> tuple[bytes, list[int], int]:
    """What has been written since a position, the new position, and how much was left out.

    A position is the file's inode and an offset.
    """
    with open(path, "rb") as log:
        held = os.fstat(log.fileno())
        first = position[1] if position and position[0] == held.st_ino else 0
        older = b""
        if position is None or first > held.st_size:
            # Cut off since then: what had come before that is in the older part.
            older, first = _older(path, first), 0
        log.seek(first)
        new = log.read()
    data = older + new
    # A line that is not complete yet is for the next time.
    unfinished = len(data) - data.rfind(b"\n") - 1 if following else 0
    complete = data[: len(data) - unfinished]
    kept = complete[-limit:]
    return kept, [held.st_ino, max(0, first + len(new) - unfinished)], len(complete) - len(kept)


def _older(path: str, first: int) -> bytes:
    try:
        with open(path + OLDER, "rb") as log:
            log.seek(first)
            return log.read()
    except OSError:
        return b""


def _timed(path: str, data: bytes) -> list[tuple[float, str]]:
    """Lines with their times. A progress bar, which overwrites itself, is one line."""
    decoded = data.replace(b"\0", b"").decode("utf-8", "replace")
    texts = [
        _ESCAPES.sub("", raw.rstrip().rpartition("\r")[2]).rstrip() for raw in decoded.split("\n")
    ]
    changed = os.stat(path).st_mtime
    stamped = [(text, _time_of(text, changed)) for text in texts]
    latest = next((stamp for _, stamp in stamped if stamp is not None), changed)
    lines = []
    for text, stamp in stamped:
        latest = latest if stamp is None else stamp
        if text:
            lines.append((latest, text))
    return lines


def _time_of(line: str, changed: float) -> float | None:
    """Seconds since the epoch; the times in logs are in this node's time zone.

    Args:
        changed: when the log was last written to. vLLM's times have no year.
    """
    found = _TIMES.search(line)
    if found is None:
        return None
    year = time.localtime(changed).tm_year
    try:
        if found["ray"]:
            return _seconds(found["ray"], "%Y-%m-%d") + float("0." + found["milli"])
        day, layout = (found["vllm"], "%Y-%m-%d") if found["vllm"] else (found["torch"], "%Y-%m%d")
        stamp = _seconds("%d-%s" % (year, day), layout)
        if stamp > changed + 86400:
            stamp = _seconds("%d-%s" % (year - 1, day), layout)
    except ValueError:
        return None
    return stamp + float("0." + (found["nano"] or "0"))


def _seconds(text: str, day: str) -> float:
    return time.mktime(time.strptime(text, day + " %H:%M:%S"))


# ---- the request ---------------------------------------------------------------------------


class AgentError(Exception):
    """The request cannot be carried out; the message is for a person."""


def main() -> None:
    _raise_limits()
    request = json.loads(sys.stdin.readline())
    name = request.pop("op")
    # Of everything but `hold`, these say under which lock it is asked for.
    guard = {} if name == "hold" else {k: request.pop(k) for k in ("lock", "token") if k in request}
    try:
        if guard and (holder_of(guard["lock"]) or {}).get("token") != guard["token"]:
            answer: dict[str, Any] = {"lost": True}
        else:
            answer = {"answer": globals()["op_" + name](**request)}
    except (AgentError, OSError) as error:
        answer = {"error": str(error)}
    json.dump(answer, sys.stdout)
    sys.stdout.write("\n")
    sys.stdout.flush()
    if _held:
        _stay()


main()
