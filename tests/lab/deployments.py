"""Writes cluster files for the lab, runs the real `mtppp` on them, and talks to what it serves."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from lab_driver import CHECKOUT, Lab

MODELS = CHECKOUT / "cluster_configs" / "models"
PROMPTS = json.loads((MODELS / "demo-prompts.json").read_text())["prompts"]
COMMAND = [sys.executable, "-m", "mtppp"]
LAUNCH_TIMEOUT = 400


def mtppp(*arguments: str, timeout: float = LAUNCH_TIMEOUT) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, whatever comes of it."""
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )


def cluster_file(
    directory: Path,
    lab: Lab,
    *,
    hosts: Sequence[str],
    model: str,
    python: Path,
    release: str = "0.32.0",
    **changes: Any,
) -> Path:
    """A cluster file for hosts of the lab, one GPU each; `changes` replace top-level keys."""
    known = lab.hosts()
    content: dict[str, Any] = {
        "name": f"{model}-pp",
        "model": {"id": str(MODELS / model), "served_name": model},
        "ssh": {"config_file": str(lab.ssh_config)},
        "nodes": [{"host": h, "address": known[h]["address"], "gpus": 1} for h in hosts],
        "runtime": {"vllm": release, "python": str(python), "device": "cpu"},
        "parallel": {"pipeline": len(hosts)},
        "speculative": {"method": "mtp", "tokens": 3},
        "serve": {
            "args": {
                "max-model-len": 512,
                "max-num-seqs": 8,
                "dtype": "float32",
            }
        },
    } | changes
    path = directory / f"{content['name']}.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in content.items() if v is not None}))
    return path


def imported_file(
    directory: Path, lab: Lab, *, hosts: Sequence[str], model: str, python: Path, release: str
) -> Path:
    """What `mtppp import` makes of the commands that people have, one for each host.

    The form of GLM-5.2's public recipe, TP8 x PP2 with MTP, at the demo model's size; exactly what
    was printed is the file.
    """
    known = lab.hosts()
    serve = (
        f"vllm serve {MODELS / model} --served-model-name {model} --tensor-parallel-size 1"
        f" --pipeline-parallel-size {len(hosts)} --nnodes {len(hosts)} --master-addr $HEAD_IP"
        " --max-model-len 512 --max-num-seqs 8 --dtype float32"
        """ --speculative-config '{"method":"mtp","num_speculative_tokens":3}'"""
    )
    scripts = []
    for rank, host in enumerate(hosts):
        script = directory / f"{host}.sh"
        headless = " --headless" if rank else ""
        script.write_text(
            f"export HEAD_IP={known[hosts[0]]['address']}\n{serve} --node-rank {rank}{headless}\n"
        )
        scripts.append(str(script))
    nodes = [f"--node={host}={known[host]['address']}" for host in hosts]
    options = ["--device=cpu", f"--vllm={release}", f"--python={python}"]
    options.append(f"--ssh-config={lab.ssh_config}")
    done = mtppp("import", *scripts, *nodes, *options, f"--name={model}-pp")
    assert done.returncode == 0, done.stderr
    assert "fill in" not in done.stderr
    path = directory / f"{model}-pp.yaml"
    path.write_text(done.stdout)
    return path


@contextmanager
def launched(file: Path) -> Iterator[Server]:
    """A deployment that runs inside the block, and is stopped after it."""
    done = mtppp("launch", str(file))
    try:
        assert done.returncode == 0, done.stderr
        content = yaml.safe_load(file.read_text())
        address = content["nodes"][0]["address"]
        yield Server(f"http://{address}:8000", content["model"]["served_name"], done.stderr)
    finally:
        stopped = mtppp("stop", str(file))
        assert stopped.returncode == 0, stopped.stderr


@dataclass(frozen=True)
class Emitted:
    """One greedy answer: ids of the prompt and of what was generated."""

    prompt: list[int]
    tokens: list[int]


@dataclass(frozen=True)
class Server:
    """A running server; `said` is what the launch printed, `key` that of its API."""

    url: str
    model: str
    said: str = ""
    key: str = ""

    @property
    def authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        asked = {"model": self.model, **body}
        headers = self.authorization
        answer = httpx.post(self.url + path, json=asked, headers=headers, timeout=300)
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def greedy(self, prompts: Sequence[str], tokens: int) -> list[Emitted]:
        """Greedy completions, several at a time so that requests share steps."""

        def one(prompt: str) -> Emitted:
            body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
            choice = self.post("/v1/completions", body | {"return_token_ids": True})["choices"][0]
            return Emitted(choice["prompt_token_ids"], choice["token_ids"])

        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(one, prompts))

    def hang_up(self, prompts: Sequence[str], *, after: int, tokens: int) -> list[int]:
        """Ask for streams of `tokens` and close each connection after `after` events, of a step's
        tokens each; how many events came."""
        asked = {"model": self.model, "max_tokens": tokens, "ignore_eos": True, "stream": True}

        def one(prompt: str) -> int:
            with httpx.stream(
                "POST",
                self.url + "/v1/completions",
                json=asked | {"prompt": prompt, "temperature": 0},
                headers=self.authorization,
                timeout=300,
            ) as answer:
                assert answer.status_code == 200
                events = (line for line in answer.iter_lines() if line.startswith("data: {"))
                came = [*itertools.islice(events, after)]
                assert not any('"error"' in event for event in came), came
                return len(came)

        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(one, prompts))

    def gaps(self, answers: Sequence[Emitted]) -> list[list[float]]:
        """For each emitted token: by how many nats this server would rather have had another."""

        def one(answer: Emitted) -> list[float]:
            ids = answer.prompt + answer.tokens
            body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
            scored = self.post("/v1/completions", body)["choices"][0]["prompt_logprobs"]
            emitted = range(len(answer.prompt), len(ids))
            return [_gap(scored[position], ids[position]) for position in emitted]

        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(one, answers))

    def accepted(self) -> tuple[int, list[int]]:
        """Drafts, and accepted draft tokens at each position."""
        drafts, accepted = 0, {}
        for name, value in self.metrics().items():
            if name.startswith("vllm:spec_decode_num_drafts_total"):
                drafts = int(value)
            if name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total"):
                position = int(name.partition('position="')[2].partition('"')[0])
                accepted[position] = int(value)
        return drafts, [accepted[position] for position in sorted(accepted)]

    def metrics(self) -> dict[str, float]:
        """Counters and gauges of vLLM and of mtppp, by name and labels."""
        lines = httpx.get(self.url + "/metrics", timeout=60).text.splitlines()
        pairs = (line.rpartition(" ") for line in lines if line.startswith(("vllm:", "mtppp_")))
        return {name: float(value) for name, _, value in pairs}

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        return sum(v for key, v in self.metrics().items() if key.partition("{")[0] == name)


def _gap(position: dict[str, dict[str, float]], token: int) -> float:
    best = max(entry["logprob"] for entry in position.values())
    return best - position[str(token)]["logprob"]
