#!/usr/bin/env python3
"""How long `mtppp launch` takes to the first token, against the same steps typed by hand over ssh.

    scripts/bench_launch.py cluster.yaml > record.json

Both arms run the same commands with the same environments: those of the Plan that the first launch
leaves on the nodes. By hand they are: `ray start` on the first node, then on each other one, the
command that places the ranks, `vllm serve`, a look at /health every second, one completion, these
two on the first node, whose port the operator may not reach. Files that a launch ships are put in
place before the clock runs. The arms alternate, and change who is first. Prints a JSON record.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import secrets
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

MTPPP = [sys.executable, "-m", "mtppp"]
PATIENCE = "900"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("cluster", type=Path, help="a cluster file whose nodes ssh reaches")
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    bench = Bench(arguments.cluster)
    bench.launch()  # leaves plugins, Plan and warm caches behind
    bench.stop()
    pairs = []
    for number in range(arguments.pairs):
        arms = [bench.launch, bench.by_hand]
        results: dict[str, Any] = {}
        for arm in arms if number % 2 == 0 else reversed(arms):
            results |= arm()
            bench.stop()
        pairs.append(results)
        say(f"pair {number + 1}: {json.dumps(results)}")
    print(json.dumps(record(arguments.cluster, pairs), indent=1))
    return 0


def record(cluster: Path, pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ratios = [pair["launch"] / pair["by_hand"] for pair in pairs]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "command": f"scripts/bench_launch.py {cluster.name} --pairs {len(pairs)}",
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}",
        "load": [round(load, 1) for load in os.getloadavg()],
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "operator_peak_mib": max(pair["operator_peak_mib"] for pair in pairs),
        "pairs": pairs,
    }


class Bench:
    """Both arms, on the nodes of one cluster file."""

    def __init__(self, cluster: Path) -> None:
        self.file = cluster
        content = yaml.safe_load(cluster.read_text())
        self.name = str(content["name"])
        if content.get("verify") != {"enabled": False}:
            sys.exit(f"{cluster}: add `verify: {{enabled: false}}`: by hand nothing is verified")
        self.hosts = [str(node["host"]) for node in content["nodes"]]
        config = content.get("ssh", {}).get("config_file")
        self.ssh = ["ssh", *(["-F", str(config)] if config else [])]

    def launch(self) -> dict[str, Any]:
        """Seconds and the operator's peak memory of `mtppp launch`, with seconds of each step."""
        started = time.monotonic()
        process = subprocess.Popen(
            [*MTPPP, "launch", str(self.file)], stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - started
        if status != 0:
            sys.exit(f"the launch failed: {said}")
        return {
            "launch": round(seconds, 1),
            "launch_steps": dict(_steps(said)),
            "operator_peak_mib": round(usage.ru_maxrss / 1024),
        }

    def stop(self) -> None:
        subprocess.run([*MTPPP, "stop", str(self.file)], check=True, capture_output=True)

    def by_hand(self) -> dict[str, Any]:
        """Seconds of the same commands typed one after the other, and of each."""
        plan = json.loads(self._on(0, f"cat /var/tmp/mtppp-$(id -u)/{self.name}/0/plan.json"))
        self._put_files(plan)
        steps: dict[str, float] = {}
        started = time.monotonic()
        for index, node in enumerate(plan["nodes"]):
            with timed(steps, f"ray start on {node['host']}"):
                # Typed by hand, it comes back when it has started.
                argv = [part for part in node["ray"]["argv"] if part != "--block"]
                self._on(index, f"cd {node['directory']} && {_line(argv, node['ray']['env'])}")
        directory = plan["nodes"][0]["directory"]
        with timed(steps, "placement"):
            self._on(0, _line(plan["placement"]["argv"], plan["placement"]["env"]))
        with timed(steps, "vllm serve until /health"):
            serve = _line(plan["server"]["argv"], plan["server"]["env"])
            log = f"{directory}/server.log"
            self._on(0, f"cd {directory}; setsid {serve} > {log} 2>&1 < /dev/null &")
            ready = f"curl -sf -m 5 -o /dev/null {plan['endpoint']}/health"
            self._on(0, f"until {ready}; do sleep 1; done")
        with timed(steps, "first completion"):
            body = {"model": plan["served_name"], "prompt": "count 3 by 4: 3 7", "max_tokens": 32}
            answer = self._on(
                0,
                f"curl -sS -m 60 -H 'Content-Type: application/json' -d {_quoted(body)}"
                f" {plan['endpoint']}/v1/completions",
            )
            if not json.loads(answer)["usage"]["completion_tokens"]:
                sys.exit("no token came by hand")
        return {"by_hand": round(time.monotonic() - started, 1), "by_hand_steps": steps}

    def _put_files(self, plan: Mapping[str, Any]) -> None:
        token = secrets.token_hex(32)
        for index, node in enumerate(plan["nodes"]):
            env = node["ray"]["env"]
            config = env["VLLM_CONFIG_ROOT"]
            kept = json.dumps(["MTPPP_RUN_DIR", "PATH", "PYTHONPATH", "RAY_AUTH_TOKEN_PATH"])
            self._on(
                index,
                f"umask 077; mkdir -p {config}; printf %s {token} > {env['RAY_AUTH_TOKEN_PATH']};"
                f" echo {shlex.quote(kept)} > {config}/ray_non_carry_over_env_vars.json",
            )

    def _on(self, index: int, command: str) -> str:
        done = subprocess.run(
            ["timeout", PATIENCE, *self.ssh, self.hosts[index], command],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            sys.exit(f"{self.hosts[index]}: {command[:200]}: {done.stderr[-2000:]}")
        return done.stdout


def _steps(said: str) -> Iterator[tuple[str, float]]:
    """The steps of a launch and their seconds, from its lines `✓ title note (1.2 s)`."""
    for line in said.splitlines():
        mark, _, rest = line.strip().partition(" ")
        if mark == "✓":
            seconds = rest.rpartition("(")[2].removesuffix(" s)")
            yield rest[:14].strip(), float(seconds)


@contextmanager
def timed(steps: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    steps[name] = round(time.monotonic() - started, 1)


def _line(argv: Sequence[str], env: Mapping[str, str]) -> str:
    return shlex.join(["env", *(f"{name}={value}" for name, value in env.items()), *argv])


def _quoted(body: Mapping[str, Any]) -> str:
    return shlex.quote(json.dumps(body))


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
