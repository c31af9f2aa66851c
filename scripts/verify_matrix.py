#!/usr/bin/env python3
"""Run `mtppp verify` between real vLLM servers on this machine: sound ones, and faulty on purpose.

    scripts/verify_matrix.py                              all comparisons, about three hours
    scripts/verify_matrix.py --only relay-off,layers-swapped
    scripts/verify_matrix.py --list

The baseline is vLLM 0.32.0 for CPUs as it ships, on two tensor ranks, without drafts, in float32;
where acceptance is compared, one rank that drafts.
Candidates with several stages or drafts run vLLM's V2 runner with the plugins that a launch would
ship; the faults are those of tests/faults. Those with changed weights run as the baseline does. The
smoke tier is asked, but where a comparison says another.
The result of each comparison goes to docs/verify-matrix.json. Exit status 1 when a verdict is not
what it must be.
"""

from __future__ import annotations

import argparse
import array
import dataclasses
import datetime
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("launcher", "patches", "scripts", "tests/faults")]

from mtppp_faults.faults import VARIABLE as FAULT_VARIABLE  # noqa: E402

from cpu_engine import engine_environment  # noqa: E402
from mtppp.console import Console  # noqa: E402
from mtppp.verify.prompts import own_set  # noqa: E402
from mtppp.verify.run import Settings  # noqa: E402
from mtppp.verify.servers import Server  # noqa: E402
from mtppp.verify.session import (  # noqa: E402
    Outcome,
    record_baseline,
    verify,
    verify_by_stored,
)
from mtppp.verify.tiers import TIERS, Tier  # noqa: E402
from mtppp_patches.engine_spec import EngineSpec, Speculative  # noqa: E402
from mtppp_patches.patch import names_needed  # noqa: E402
from mtppp_patches.registry import PATCHES  # noqa: E402

MODELS = ROOT / "cluster_configs/models"
RESULTS = ROOT / "docs/verify-matrix.json"
SMOKE = TIERS["smoke"]
START = 600.0  # seconds until a server must be ready

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}

Tensors = dict[str, tuple[str, list[int], bytes]]
"""Name -> dtype, shape, data of a safetensors file."""


@dataclass(frozen=True)
class Arm:
    """One server.

    Attributes:
        drafts: draft tokens per step; 0 without MTP.
        model: one of cluster_configs/models.
        fault: of tests/faults.
        weights: what is done to the tensors of the model's file.
        more: arguments of `vllm serve` besides.
    """

    release: str = "0.32.0"
    pipeline: int = 1
    tensor: int = 1
    drafts: int = 0
    dtype: str = "float32"
    model: str = "demo-glm4-moe"
    fault: str = ""
    weights: Callable[[Tensors], None] | None = None
    more: tuple[str, ...] = ()

    @property
    def as_shipped(self) -> bool:
        """Whether vLLM runs without our plugins, with its V1 runner."""
        return self.pipeline == 1 and not self.drafts


BASELINE = Arm(tensor=2)


@dataclass(frozen=True)
class Comparison:
    """A candidate, and what must be said of it.

    Attributes:
        allowed: verdicts that are right.
        cause: what a FAIL must name; "" when anything will do.
        drafts: what must be said of acceptance; "" when anything will do.
        stored: the baseline is recorded first, and does not judge itself.
        timeout: seconds for an answer.
    """

    what: str
    candidate: Arm
    allowed: tuple[str, ...]
    cause: str = ""
    baseline: Arm = BASELINE
    drafts: str = ""
    tier: Tier = SMOKE
    stored: bool = False
    timeout: float = 1200.0


def scaled(name: str, factor: float) -> Callable[[Tensors], None]:
    """Multiplies bfloat16 tensors whose name begins so."""

    def change(tensors: Tensors) -> None:
        found = [key for key in tensors if key.startswith(name)]
        assert found, name
        for key in found:
            dtype, shape, data = tensors[key]
            assert dtype == "BF16", dtype
            upper = array.array("H", data)
            numbers = struct.unpack(
                f"<{len(upper)}f", struct.pack(f"<{len(upper)}I", *(half << 16 for half in upper))
            )
            bits = struct.unpack(
                f"<{len(upper)}I", struct.pack(f"<{len(upper)}f", *(n * factor for n in numbers))
            )
            rounded = array.array("H", (min(0xFFFF, (b + 0x8000) >> 16) for b in bits))
            tensors[key] = dtype, shape, rounded.tobytes()

    return change


def swapped(one: int, other: int) -> Callable[[Tensors], None]:
    """Two layers in each other's place."""

    def change(tensors: Tensors) -> None:
        prefix = f"model.layers.{one}."
        for name in [name for name in tensors if name.startswith(prefix)]:
            partner = f"model.layers.{other}.{name.removeprefix(prefix)}"
            tensors[name], tensors[partner] = tensors[partner], tensors[name]

    return change


def without_own_embedding(tensors: Tensors) -> None:
    """The MTP layer's copy of the embedding left out, as most checkpoints have it."""
    copies = [name for name in tensors if re.fullmatch(r"model\.layers\..*embed_tokens.*", name)]
    assert copies
    for name in copies:
        del tensors[name]


_MTP = Arm(pipeline=2, drafts=3)
_DEEPSEEK = Arm(model="demo-deepseek-v3", drafts=3, weights=without_own_embedding)
_SECOND_STAGE = "model.layers.4."  # of 0-5; the second of two stages begins with 3

COMPARISONS: dict[str, Comparison] = {
    "pp2-mtp": Comparison("PP2 with MTP", _MTP, ("PASS",)),
    "tp1": Comparison("TP1", Arm(), ("PASS",)),
    "tp1-stored": Comparison("TP1, by a stored baseline", Arm(), ("PASS",), stored=True),
    "tp1-certify": Comparison("TP1, certify tier", Arm(), ("PASS",), tier=TIERS["certify"]),
    # Number formats must be the same: this one is no sound arm, and neither a PASS nor a FAIL.
    "bfloat16": Comparison(
        "TP2 in bfloat16, against float32",
        Arm(tensor=2, dtype="bfloat16"),
        ("INCONCLUSIVE",),
    ),
    "relay-off": Comparison(
        "0.29.0, PP2 with MTP, the gate lifted and drafts not relayed",
        dataclasses.replace(_MTP, release="0.29.0", fault="relay_off"),
        ("FAIL",),
        cause="decode or speculation",
    ),
    # The stages disagree on what is sent. Where gloo notices, the engine ends; otherwise it serves.
    "gate-only": Comparison(
        "0.29.0, PP2 with MTP, the gate lifted and nothing else",
        dataclasses.replace(_MTP, release="0.29.0", fault="gate_only"),
        ("INCONCLUSIVE", "FAIL"),
        timeout=120.0,
    ),
    "embedding-on": Comparison(
        "0.29.0, PP2 with MTP, checkpoint without the drafter's own embedding",
        dataclasses.replace(_DEEPSEEK, release="0.29.0", pipeline=2),
        ("PASS",),
        baseline=_DEEPSEEK,
        drafts="AS REFERENCE",
    ),
    "embedding-off": Comparison(
        "the same, and the drafter's embedding not loaded",
        dataclasses.replace(_DEEPSEEK, release="0.29.0", pipeline=2, fault="embedding_off"),
        ("PASS",),
        baseline=_DEEPSEEK,
        drafts="LOW",
    ),
    "layers-swapped": Comparison(
        "layers 3 and 4 swapped",
        Arm(weights=swapped(3, 4)),
        ("FAIL",),
        cause="weights or forward pass",
    ),
    "layers-swapped-stored": Comparison(
        "layers 3 and 4 swapped, by a stored baseline",
        Arm(weights=swapped(3, 4)),
        ("FAIL",),
        cause="weights or forward pass",
        stored=True,
    ),
    "expert-1.05": Comparison(
        "one expert of layer 4 times 1.05",
        Arm(weights=scaled(f"{_SECOND_STAGE}mlp.experts.0.down_proj", 1.05)),
        ("PASS", "INCONCLUSIVE", "FAIL"),
    ),
    "expert-1.5": Comparison(
        "one expert of layer 4 times 1.5",
        Arm(weights=scaled(f"{_SECOND_STAGE}mlp.experts.0.down_proj", 1.5)),
        ("PASS", "INCONCLUSIVE", "FAIL"),
    ),
    "expert-1.5-certify": Comparison(
        "one expert of layer 4 times 1.5, certify tier",
        Arm(weights=scaled(f"{_SECOND_STAGE}mlp.experts.0.down_proj", 1.5)),
        ("INCONCLUSIVE", "FAIL"),
        tier=TIERS["certify"],
    ),
    "expert-2": Comparison(
        "one expert of layer 4 times 2",
        Arm(weights=scaled(f"{_SECOND_STAGE}mlp.experts.0.down_proj", 2.0)),
        ("PASS", "INCONCLUSIVE", "FAIL"),
    ),
    "expert-8": Comparison(
        "one expert of layer 4 times 8",
        Arm(weights=scaled(f"{_SECOND_STAGE}mlp.experts.0.down_proj", 8.0)),
        ("FAIL",),
        cause="weights or forward pass",
    ),
    "norm-1.05": Comparison(
        "one norm of layer 4 times 1.05",
        Arm(weights=scaled(f"{_SECOND_STAGE}post_attention_layernorm", 1.05)),
        ("PASS", "INCONCLUSIVE", "FAIL"),
    ),
    "norm-1.2": Comparison(
        "one norm of layer 4 times 1.2",
        Arm(weights=scaled(f"{_SECOND_STAGE}post_attention_layernorm", 1.2)),
        ("PASS", "INCONCLUSIVE", "FAIL"),
    ),
    "norm-2": Comparison(
        "one norm of layer 4 times 2",
        Arm(weights=scaled(f"{_SECOND_STAGE}post_attention_layernorm", 2.0)),
        ("PASS", "INCONCLUSIVE", "FAIL"),
    ),
}


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--list", action="store_true", help="the names, and nothing else")
    parser.add_argument("--port", type=int, default=8300)
    arguments = parser.parse_args()
    if arguments.list:
        for name, comparison in COMPARISONS.items():
            print(f"{name:16} {comparison.what}")
        return 0
    names = arguments.only.split(",") if arguments.only else list(COMPARISONS)
    right = True
    for arm in dict.fromkeys(COMPARISONS[name].baseline for name in names):
        with serving(arm, arguments.port) as baseline:
            for name in names:
                if COMPARISONS[name].baseline == arm:
                    right &= compared(name, baseline, arguments.port + 1)
    return 0 if right else 1


def compared(name: str, baseline: str, port: int) -> bool:
    """Run one comparison and keep its result; whether it is as it must be."""
    comparison = COMPARISONS[name]
    with serving(comparison.candidate, port) as candidate:
        started = time.monotonic()
        outcome = compare(
            candidate,
            baseline,
            comparison.tier,
            timeout=comparison.timeout,
            stored=comparison.stored,
        )
    is_right = as_it_must_be(comparison, outcome)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[name] = {
        "what": comparison.what,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "right": is_right,
        "seconds": round(time.monotonic() - started),
        "requests": comparison.tier.requests,
        "report": outcome.lines[: outcome.lines.index("") if "" in outcome.lines else None],
        **{
            key: outcome.result[key]
            for key in ("verdict", "cause", "figures", "acceptance", "directions", "warnings")
        },
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(outcome.lines), flush=True)
    print(f"--- {name}: {'as' if is_right else 'NOT AS'} it must be", flush=True)
    return is_right


def as_it_must_be(comparison: Comparison, outcome: Outcome) -> bool:
    verdict = outcome.verdict
    return (
        verdict.outcome in comparison.allowed
        and comparison.cause in ("", verdict.cause)
        and comparison.drafts in ("", verdict.acceptance.outcome)
    )


def compare(
    candidate: str, baseline: str, tier: Tier, *, timeout: float, stored: bool = False
) -> Outcome:
    """A verification by mtppp's own prompts; `stored`: by what the baseline has kept."""
    prompts = own_set(tier.requests)
    ours, theirs = Server("candidate", candidate), Server("baseline", baseline)
    with (
        tempfile.TemporaryDirectory(prefix="verify-matrix-") as directory,
        Console().step("verify") as step,
    ):
        run, kept = Path(directory, "run"), Path(directory, "baseline")
        settings = Settings(tier, timeout=timeout, same_model=True)
        asking: dict[str, Any] = {"about": {}, "progress": step.count}
        if not stored:
            return verify(run, settings, prompts, candidate=ours, baseline=theirs, **asking)
        record_baseline(kept, settings, prompts, baseline=theirs, **asking)
        return verify_by_stored(run, kept, settings, prompts, candidate=ours, **asking)


@contextmanager
def serving(arm: Arm, port: int) -> Iterator[str]:
    """A server that runs inside the block; its URL."""
    with tempfile.TemporaryDirectory(prefix="verify-server-") as name:
        directory = Path(name)
        model = changed_model(arm, directory) if arm.weights else MODELS / arm.model
        with (directory / "log").open("w") as log:
            process = subprocess.Popen(
                [str(part) for part in command(arm, model, port)],
                env={**os.environ, **_ENVIRONMENT, **environment(arm, directory)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(process, url, directory / "log")
            yield url
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server, with its session and the shared memory that it would leave behind."""
    segments = shared_memory(session(process.pid))
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for segment in segments:
        segment.unlink(missing_ok=True)


def session(leader: int) -> list[int]:
    """Processes of a session, by number."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            if os.getsid(int(directory.name)) == leader:
                found.append(int(directory.name))
    return found


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """Segments that these processes have mapped. vLLM for CPUs never removes those of its ranks."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                path = line.split(maxsplit=5)[-1]
                if path.startswith("/dev/shm/"):
                    found.add(Path(path.removesuffix(" (deleted)")))
    return found


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with opener.open(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    lines = log.read_text(errors="replace").splitlines()
    raise SystemExit("\n".join([f"{url} does not serve; its log ends:", *lines[-30:]]))


def command(arm: Arm, model: Path, port: int) -> list[Any]:
    made = subprocess.run(
        [ROOT / "scripts/environment", arm.release], stdout=subprocess.PIPE, text=True, check=True
    )
    arguments: list[Any] = [
        *(made.stdout.strip(), "-m", "vllm.entrypoints.cli.main", "serve", model),
        *("--served-model-name", arm.model, "--host", "127.0.0.1", "--port", port),
        *("--dtype", arm.dtype, "--enforce-eager", "--seed", 0),
        *("--max-model-len", 1024, "--max-num-seqs", 16),
        *("--tensor-parallel-size", arm.tensor, "--pipeline-parallel-size", arm.pipeline),
        *arm.more,
    ]
    if arm.as_shipped:
        return arguments
    arguments += ["--block-size", 32, "--async-scheduling"]
    if arm.drafts:
        speculative = {"method": "mtp", "num_speculative_tokens": arm.drafts}
        arguments += ["--speculative-config", json.dumps(speculative)]
    return arguments


def environment(arm: Arm, directory: Path) -> dict[str, str]:
    if arm.as_shipped:
        return {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    packages = [*(["mtppp_faults"] if arm.fault else []), "mtppp_patches", "mtppp_cpu"]
    spec = EngineSpec(
        arm.release,
        json.loads((MODELS / arm.model / "config.json").read_text())["model_type"],
        device="cpu",
        pipeline=arm.pipeline,
        tensor=arm.tensor,
        speculative=Speculative("mtp", arm.drafts) if arm.drafts else None,
    )
    spec = dataclasses.replace(spec, patches=names_needed(PATCHES, spec))
    return {
        **engine_environment(packages, directory),
        "MTPPP_ENGINE": spec.to_json(),
        **({FAULT_VARIABLE: arm.fault} if arm.fault else {}),
    }


def changed_model(arm: Arm, directory: Path) -> Path:
    """A copy of the model with other weights."""
    copy = directory / arm.model
    shutil.copytree(MODELS / arm.model, copy)
    file = copy / "model.safetensors"
    raw = file.read_bytes()
    [size] = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    metadata = header.pop("__metadata__", {"format": "pt"})
    tensors: Tensors = {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }
    assert arm.weights is not None
    arm.weights(tensors)
    written: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape, content) in tensors.items():
        written[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(content)]}
        end += len(content)
    head = json.dumps(written).encode()
    head += b" " * (-len(head) % 8)
    contents = [content for _, _, content in tensors.values()]
    file.write_bytes(b"".join([struct.pack("<Q", len(head)), head, *contents]))
    return copy


if __name__ == "__main__":
    sys.exit(main())
