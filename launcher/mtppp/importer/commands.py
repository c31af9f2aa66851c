"""Finds the commands that serve a model in what a person pasted: plain, wrapped, in containers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePosixPath

from mtppp.errors import ConfigurationError
from mtppp.importer.shell import Simple, Word, read_script

_SERVER_MODULE = "vllm.entrypoints.openai.api_server"
_CLI_MODULE = "vllm.entrypoints.cli.main"
_CONTAINER_TOOLS = frozenset({"docker", "podman", "nerdctl"})
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_TAG = re.compile(r"v?([0-9]+\.[0-9]+\.[0-9]+(?:\.post[0-9]+)?)(?:[-+].*)?")

# Options of `docker run` that take no value; all others do.
_DOCKER_SWITCHES = frozenset(
    {
        *("--detach", "--disable-content-trust", "--init", "--interactive", "--no-healthcheck"),
        *("--oom-kill-disable", "--privileged", "--publish-all", "--quiet", "--read-only", "--rm"),
        *("--sig-proxy", "--tty", "--use-api-socket", "-d", "-i", "-t", "-P", "-q"),
    }
)


# A script exports what its own lines use, too; these are for vLLM and what it is built on.
_EXPORTED = re.compile(
    r"(?:VLLM|NCCL|GLOO|RAY|HF|HUGGING_FACE|CUDA|TORCH|TORCHINDUCTOR|PYTORCH|OMP|MKL|TRITON|UCX|NVSHMEM"
    r"|NVIDIA|FLASHINFER|DG|SAFETENSORS|TRANSFORMERS|TOKENIZERS|LD|MTPPP)_[A-Z0-9_]+"
    r"|(?:https?|no|HTTPS?|NO)_(?:proxy|PROXY)|PATH|PYTHONPATH"
)


@dataclass(frozen=True)
class Container:
    """The container that a command runs in.

    Attributes:
        mounts: (on the host, in the container) of every bind mount.
    """

    image: str
    mounts: tuple[tuple[str, str], ...] = ()

    @property
    def release(self) -> str | None:
        """vLLM's release by the image's tag; None where the tag is none."""
        tag = self.image.rpartition("/")[2].partition(":")[2].partition("@")[0]
        match = _TAG.fullmatch(tag)
        return match[1] if match else None

    @property
    def is_for_cpus(self) -> bool:
        """Whether it is one of vLLM's images for CPUs: `vllm-openai-cpu`, `vllm-cpu-env`."""
        name = self.image.rpartition("/")[2].partition(":")[0].partition("@")[0]
        return "cpu" in name.split("-")

    def on_host(self, path: str) -> str:
        """Where a path of the container lies on the host; itself where it is not mounted."""
        for host, inside in sorted(self.mounts, key=lambda mount: -len(mount[1])):
            if path == inside or path.startswith(f"{inside.rstrip('/')}/"):
                return host.rstrip("/") + path[len(inside.rstrip("/")) :]
        return path


@dataclass(frozen=True)
class ServeCommand:
    """A command that serves a model.

    Attributes:
        arguments: behind `vllm serve`.
        env: variables for it, names to values.
        python: the interpreter that has vLLM, where the command tells.
        passed_on: variables whose values come from the environment (`docker run -e NAME`).
        where: "serve.sh:12" or "line 12".
    """

    arguments: tuple[Word, ...]
    env: Mapping[str, Word]
    python: str | None
    container: Container | None
    where: str
    passed_on: tuple[str, ...] = ()


@dataclass
class Found:
    """What is in a text.

    Attributes:
        other: commands that people need with plain vLLM and that mtppp has no use for.
    """

    serve: list[ServeCommand] = field(default_factory=list)
    other: list[str] = field(default_factory=list)


def find_commands(text: str, source: str = "", given: Mapping[str, str] | None = None) -> Found:
    """The commands in a script that serve a model.

    Raises:
        ConfigurationError: the text cannot be read, or runs something in a way that hides it.
    """
    found = Found()
    activated: str | None = None
    for simple in read_script(text, source, given):
        if venv := _activated(simple.words):
            activated = venv
        served = list(_serving(simple, activated))
        found.serve += served
        if not served and _is_ray(simple.words):
            found.other.append(f"{simple.where}: {' '.join(w.text for w in simple.words[:3])}")
    return found


def _activated(words: Sequence[Word]) -> str | None:
    """The python of `source DIR/bin/activate`."""
    if len(words) != 2 or words[0].text not in ("source", "."):
        return None
    path = words[1].text
    return f"{path.removesuffix('/activate')}/python" if path.endswith("/bin/activate") else None


def _is_ray(words: Sequence[Word]) -> bool:
    names = [PurePosixPath(word.text).name for word in words]
    return any(pair in {("ray", "start"), ("ray", "stop")} for pair in pairwise(names))


def _serving(simple: Simple, activated: str | None) -> Iterator[ServeCommand]:
    words = simple.words
    env = {**_for_vllm(simple.exported), **simple.env}
    if (at := _container_at(words)) is not None:
        yield from _in_container(simple, words[at:], env)
        return
    for index, word in enumerate(words):
        if _is_serve(words, index):
            env |= _assignments(words[:index])
            python = _python_of(word.text, words, index) or activated
            begin = index + (3 if word.text == "-m" and _names_cli(words, index) else 2)
            yield ServeCommand(words[begin:], env, python, None, simple.where)
            return
    yield from _in_words(simple, words, env, activated)


def _for_vllm(exported: Mapping[str, Word]) -> dict[str, Word]:
    return {name: value for name, value in exported.items() if _EXPORTED.fullmatch(name)}


def _in_words(
    simple: Simple, words: Sequence[Word], env: dict[str, Word], activated: str | None
) -> Iterator[ServeCommand]:
    """A command inside a word: `bash -c '...'`, `ssh host '...'`."""
    for word in words[1:]:
        if not re.search(r"vllm\s|vllm\.entrypoints", word.text) or " " not in word.text:
            continue
        for inner in find_commands(word.text).serve:
            yield ServeCommand(
                inner.arguments,
                {**env, **inner.env},
                inner.python or activated,
                inner.container,
                simple.where,
                inner.passed_on,
            )


def _is_serve(words: Sequence[Word], index: int) -> bool:
    """Whether `vllm serve`, or `-m` and vLLM's module, stands at `index`."""
    following = words[index + 1].text if index + 1 < len(words) else ""
    if PurePosixPath(words[index].text).name == "vllm":
        return following == "serve"
    if words[index].text != "-m":
        return False
    return following == _SERVER_MODULE or _names_cli(words, index)


def _names_cli(words: Sequence[Word], index: int) -> bool:
    return [word.text for word in words[index + 1 : index + 3]] == [_CLI_MODULE, "serve"]


def _python_of(program: str, words: Sequence[Word], index: int) -> str | None:
    """The interpreter: the one that runs the module, or the one beside the script `vllm`."""
    path = words[index - 1].text if program == "-m" and index else program
    directory, slash, name = path.rpartition("/")
    if not slash or not path.startswith(("/", "~/")):
        return None
    return path if name.startswith("python") else f"{directory}/python"


def _assignments(words: Sequence[Word]) -> dict[str, Word]:
    """Those of `env X=1 ...` and `sudo X=1 ...`."""
    found = {}
    for word in words:
        if match := _ASSIGNMENT.fullmatch(word.text):
            found[match[1]] = Word(match[2], word.unknown)
    return found


def _container_at(words: Sequence[Word]) -> int | None:
    for index, word in enumerate(words[:-1]):
        is_tool = PurePosixPath(word.text).name in _CONTAINER_TOOLS
        if is_tool and words[index + 1].text in ("run", "container"):
            return index
    return None


@dataclass
class _DockerRun:
    """The options of one `docker run`."""

    env: dict[str, Word] = field(default_factory=dict)
    passed_on: list[str] = field(default_factory=list)
    mounts: list[tuple[str, str]] = field(default_factory=list)
    entrypoint: Word | None = None

    def take(self, option: str, value: Word, where: str) -> None:
        if option in ("-e", "--env"):
            name, equals, text = value.text.partition("=")
            if equals:
                self.env[name] = Word(text, value.unknown)
            else:
                self.passed_on.append(name)
        elif option == "--env-file":
            raise ConfigurationError(
                f"{where}: --env-file {value} is not read",
                hint="put its variables into the command: -e NAME=VALUE",
            )
        elif option in ("-v", "--volume"):
            host, _, inside = value.text.partition(":")
            self.mounts.append((host, inside.partition(":")[0]))
        elif option == "--mount":
            fields = dict(part.partition("=")[::2] for part in value.text.split(","))
            host = fields.get("source", fields.get("src", ""))
            inside = fields.get("target", fields.get("destination", fields.get("dst", "")))
            if host and inside:
                self.mounts.append((host, inside))
        elif option == "--entrypoint":
            self.entrypoint = value


def _in_container(
    simple: Simple, words: Sequence[Word], env: dict[str, Word]
) -> Iterator[ServeCommand]:
    run = _DockerRun()
    position = 3 if words[1].text == "container" else 2
    while position < len(words) and words[position].text.startswith("-"):
        option, equals, attached = words[position].text.partition("=")
        if equals:
            run.take(option, Word(attached, words[position].unknown), simple.where)
        elif not _is_switch(option):
            position += 1
            if position < len(words):
                run.take(option, words[position], simple.where)
        position += 1
    if position >= len(words):
        raise ConfigurationError(
            f"{simple.where}: {' '.join(w.text for w in words[:2])} names no image",
            hint="is the command complete? Every line but the last ends with a backslash",
        )
    container = Container(words[position].text, tuple(run.mounts))
    arguments = words[position + 1 :]
    if run.entrypoint is not None:
        arguments = (run.entrypoint, *arguments)
    inner = Simple(tuple(arguments), {}, {}, simple.where)
    env = {**run.env}
    served = list(_serving(inner, None))
    if not served and run.entrypoint is None and "vllm" in container.image:
        # The entry point of vLLM's own images is the server.
        served = [ServeCommand(tuple(arguments), {}, None, None, simple.where)]
    for command in served:
        yield ServeCommand(
            command.arguments,
            {**env, **command.env},
            None,
            container,
            simple.where,
            tuple(run.passed_on),
        )


def _is_switch(option: str) -> bool:
    """Whether an option of `docker run` takes no value; short ones may stand together: -dit."""
    if option in _DOCKER_SWITCHES:
        return True
    letters = option[1:]
    return not option.startswith("--") and len(letters) > 1 and set(letters) <= set("ditPq")
