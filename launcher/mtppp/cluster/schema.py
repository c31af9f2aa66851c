"""What may stand in cluster.yaml. The reference page is generated from these models.

Validation is pure; relative paths need `Surroundings` as pydantic's validation context.
"""

from __future__ import annotations

import ipaddress
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    JsonValue,
    StrictInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from mtppp.cluster.fields import (
    MAX_COUNT,
    MAX_PORT,
    Count,
    FieldErrors,
    OperatorPath,
    Port,
    Section,
    UserName,
    matching,
    raise_if_any,
    surroundings_of,
)
from mtppp.cluster.managed import env_problems, flag_problems, secret_problems
from mtppp.cluster.source import Problem, describe
from mtppp.gpus import GPU_TYPES

PORTS_PER_NODE = 100

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


class Model(Section):
    """The model that is served."""

    id: str = Field(
        description=(
            "A hub id such as `zai-org/GLM-5.2-FP8`, or a path that exists on every node. A path "
            "begins with `/`, `./`, `../` or `~/`; `./` and `../` start at the cluster file's "
            "directory, `~/` at the home directory on the node."
        )
    )
    revision: (
        Annotated[str, matching(r"[A-Za-z0-9][\w./-]*", "a branch, a tag or a commit")] | None
    ) = Field(
        default=None,
        description="Branch, tag or commit on the hub; the default branch if not given.",
    )
    config: OperatorPath | None = Field(
        default=None,
        description=(
            "The model's `config.json`, or the directory that holds it, on the operator's side, "
            "relative to the cluster file."
        ),
    )
    served_name: Annotated[
        str, matching(r"[^\s-]\S*|", "a name without spaces that does not begin with a dash")
    ] = Field(
        default="",
        validate_default=True,
        description="The name clients ask for; the last part of `id` by default.",
    )

    @property
    def is_path(self) -> bool:
        """Whether `id` is a path on the nodes and not a hub id."""
        return self.id.startswith(("/", "~"))

    @field_validator("id")
    @classmethod
    def _absolute_or_hub_id(cls, value: str, info: ValidationInfo) -> str:
        if value.startswith(("/", "~/")):
            return posixpath.normpath(value)
        if value.startswith(("./", "../")):
            surroundings = surroundings_of(info)
            if surroundings is None:
                raise ValueError(f"must be an absolute path or a hub id; is {describe(value)}")
            return posixpath.normpath(surroundings.directory / value)
        if not _HUB_ID.fullmatch(value) or "--" in value or ".." in value:
            raise ValueError(
                'must be a hub id such as "org/name", or a path that begins with /, ./, ../ or ~/; '
                f"is {describe(value)}"
            )
        return value

    @field_validator("served_name")
    @classmethod
    def _last_part_of_id(cls, value: str, info: ValidationInfo) -> str:
        if value or "id" not in info.data:
            return value
        if name := PurePosixPath(info.data["id"]).name:
            return name
        raise ValueError("required, because model.id has no last part to take it from")

    @model_validator(mode="after")
    def _revision_of_a_hub_id(self) -> Self:
        if self.is_path and self.revision is not None:
            raise FieldErrors(
                [Problem(("revision",), "a model that is a path has no revision; remove it")]
            )
        return self


def _joined(value: object) -> object:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) and value else value


_HOP = r"(?:[^\s,@:/]+@)?(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*)(?::[0-9]+)?"
ProxyJump = Annotated[
    str,
    matching(
        rf"{_HOP}(?:, *{_HOP})*",
        "none, or one or several [user@]host[:port] with commas between them",
    ),
    BeforeValidator(_joined),
]


class Ssh(Section):
    """How nodes are reached; what is not given here is as `ssh` itself would have it."""

    user: UserName | None = Field(
        default=None, description="User on the nodes; by default what the ssh configuration says."
    )
    identity_file: OperatorPath | None = Field(
        default=None,
        description="Private key; by default those of the agent and the ssh configuration.",
    )
    port: Port | None = Field(default=None, description="Port of sshd on the nodes.")
    config_file: OperatorPath | None = Field(
        default=None, description="The ssh configuration to read; `~/.ssh/config` by default."
    )
    known_hosts: OperatorPath | None = Field(
        default=None, description="The host keys to trust; `~/.ssh/known_hosts` by default."
    )
    proxy_jump: ProxyJump | None = Field(
        default=None,
        description=(
            "Hosts to go through, in this order, as `ssh -J` has them: `user@bastion:22,inner`, or "
            "a list. The keys of all of them are checked. By default what the ssh configuration "
            "says of the node; `none` overrides it."
        ),
    )
    connect_timeout: Count = Field(
        default=10, description="Seconds until a connection is given up."
    )


def _host(value: str) -> str:
    if _ip_or_none(value) is not None:
        return value
    if user := re.fullmatch(r"(.+)@([^@]+)", value):
        raise ValueError(f"must be a host alone; put {describe(user[1])} under user")
    if not re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?", value):
        raise ValueError(
            "must be a host name, an IP address or a name from the ssh configuration; "
            f"is {describe(value)}"
        )
    return value


def _ip_or_none(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _gpu_type(value: str) -> str:
    if value in GPU_TYPES:
        return value
    close = get_close_matches(value.upper(), GPU_TYPES, n=1)
    known = f"did you mean {close[0]}?" if close else f"known are {', '.join(GPU_TYPES)}"
    raise ValueError(f"must be a GPU type that mtppp knows; is {describe(value)}; {known}")


GpuName = Annotated[str, AfterValidator(_gpu_type)]


class Node(Section):
    """One host. `10.0.0.1` or `ubuntu@10.0.0.1` in place of a mapping gives `host` and `user`."""

    host: Annotated[str, AfterValidator(_host)] = Field(
        description=(
            "How the operator's side reaches the node: a host name, an address, or a name from the "
            "ssh configuration. Messages call the node by it."
        )
    )
    address: str = Field(
        default="",
        validate_default=True,
        description=(
            "The node's IP address on the network that carries the model's traffic, as the other "
            "nodes reach it. It may be left out where `host` is an IP address."
        ),
    )
    gpus: Count = Field(description="GPUs to use; `gpus_per_node` by default.")
    gpu_type: GpuName | None = Field(
        default=None,
        description=(
            "Their type, such as `H100-80GB`; the cluster's `gpu_type` by default. With it `mtppp "
            "plan` knows what fits before a host is asked; a launch checks that the hosts have it."
        ),
    )
    transport: Literal["ssh", "local"] = Field(
        default="ssh",
        description=(
            "`local` runs a node on the operator's own machine, at an address of its own such as "
            "127.0.1.1."
        ),
    )
    user: UserName | None = Field(default=None, description="In place of `ssh.user`.")
    port: Port | None = Field(default=None, description="In place of `ssh.port`.")
    identity_file: OperatorPath | None = Field(
        default=None, description="In place of `ssh.identity_file`."
    )
    proxy_jump: ProxyJump | None = Field(
        default=None,
        description="In place of `ssh.proxy_jump`; `none` for a node that is reached directly.",
    )

    @field_validator("address")
    @classmethod
    def _canonical_address(cls, value: str, info: ValidationInfo) -> str:
        if not value and "host" not in info.data:
            return value  # `host` is what is wrong
        address = _ip_or_none(value or info.data["host"])
        if address is None and not value:
            raise ValueError("required, because host is not an IP address")
        if address is None:
            raise ValueError(f"must be an IP address; is {describe(value)}")
        if isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None:
            raise ValueError("must be an address without a zone such as %eth0")
        if address.is_unspecified or address.is_multicast or str(address) == "255.255.255.255":
            raise ValueError(f"must be the address of one host; is {describe(str(address))}")
        return str(address)

    @model_validator(mode="after")
    def _nothing_of_ssh_when_local(self) -> Self:
        if self.transport == "local":
            raise_if_any(
                [
                    Problem((key,), "has no meaning with transport: local; remove it")
                    for key in ("user", "port", "identity_file", "proxy_jump")
                    if getattr(self, key) is not None
                ]
            )
        return self


def _node_python(value: str) -> str:
    if not value.startswith(("/", "~/")) or value.endswith("/"):
        raise ValueError(
            'must be the path of a Python that begins with "/" or "~/", the home directory on the '
            f"node; is {describe(value)}"
        )
    return value


NodePath = Annotated[str, matching(r"/.*", "an absolute path on the nodes")]
MANAGED_WITH = "/usr/bin/python3"
"""The Python that a managed environment is made with where the file names none."""


class Runtime(Section):
    """How vLLM is had on a node."""

    vllm: Annotated[
        str,
        matching(r"[0-9]+\.[0-9]+\.[0-9]+(?:\.post[0-9]+)?", 'one release such as "0.32.0"'),
    ] = Field(description="The vLLM release; every node is checked to have exactly this one.")
    environment: Literal["managed"] | None = Field(
        default=None,
        description=(
            "`managed`: mtppp makes an environment on every node, below /var/tmp, of a locked list "
            "of distributions with hashes; it is made once and used again."
        ),
    )
    python: str = Field(
        default="",
        validate_default=True,
        description=(
            "The Python on every node that has vLLM and Ray: an absolute path, or one that begins "
            "with `~/`, the home directory on the node. Of a managed environment, the Python that "
            "it is made with, `/usr/bin/python3` by default."
        ),
    )
    lock: OperatorPath | None = Field(
        default=None,
        description=(
            "Of a managed environment: what it holds, in place of the lock that comes with mtppp "
            "(`scripts/lock_environment.py` makes one)."
        ),
    )
    wheelhouse: NodePath | None = Field(
        default=None,
        description=(
            "Of a managed environment: the directory on every node that has all its wheels; no "
            "index is asked then. Without it they come from where the nodes' pip is configured to "
            "look."
        ),
    )
    device: Literal["cuda", "cpu"] = Field(
        default="cuda",
        description="`cpu` is for the demo and for tests; it is far too slow to serve with.",
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "Environment variables for vLLM and Ray on every node. Not those that mtppp sets "
            "itself, and no secrets: see `secrets`."
        ),
    )

    @field_validator("python")
    @classmethod
    def _python_on_the_node(cls, value: str, info: ValidationInfo) -> str:
        if value:
            return _node_python(value)
        if "environment" in info.data and info.data["environment"] is None:
            raise ValueError("required, unless environment is managed")
        return MANAGED_WITH

    @model_validator(mode="after")
    def _lock_of_a_managed_environment(self) -> Self:
        if self.environment is None:
            raise_if_any(
                [
                    Problem((key,), "belongs to environment: managed; add that or remove this")
                    for key in ("lock", "wheelhouse")
                    if getattr(self, key) is not None
                ]
            )
        return self

    @field_validator("env", mode="before")
    @classmethod
    def _env_as_text(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        raise_if_any(list(env_problems(value)))
        return {name: str(text) for name, text in value.items()}


class Parallel(Section):
    """How the model is divided. GPUs used: `tensor` times `pipeline`."""

    tensor: Count = Field(
        default=1, description="Tensor-parallel size: GPUs that share each layer."
    )
    pipeline: Count = Field(
        default=1, description="Pipeline-parallel size: stages, in the order of nodes."
    )
    layer_partition: Literal["auto"] | tuple[Count, ...] = Field(
        default="auto",
        description=(
            "Layers of each stage, first to last, such as `[42, 36]`; `auto` finds the most even "
            "division that is right for the model. The MTP layer is not counted."
        ),
    )

    @field_validator("layer_partition", mode="before")
    @classmethod
    def _auto_or_counts(cls, value: object) -> object:
        if value == "auto":
            return value
        counts = value if isinstance(value, list | tuple) else None
        if counts is None:
            raise ValueError(
                f"must be auto, or a list of the layers of each stage; is {describe(value)}"
            )
        raise_if_any(
            [
                Problem((i,), f"must be a whole number of at least 1; is {describe(layers)}")
                for i, layers in enumerate(counts)
                if type(layers) is not int or layers < 1
            ]
        )
        return tuple(counts)

    @model_validator(mode="after")
    def _one_count_per_stage(self) -> Self:
        if self.layer_partition != "auto" and len(self.layer_partition) != self.pipeline:
            message = (
                f"must have one number for each of the {self.pipeline} stages that "
                f"parallel.pipeline asks for; has {len(self.layer_partition)}"
            )
            raise FieldErrors([Problem(("layer_partition",), message)])
        return self


class Speculative(Section):
    """Speculative decoding; without this section there is none."""

    method: Literal["mtp"] = Field(
        default="mtp", description="The model's own MTP layer drafts tokens."
    )
    tokens: Annotated[StrictInt, Field(ge=1, le=16)] = Field(
        description="Tokens drafted for each step."
    )


class Serve(Section):
    """The API server, on the first node."""

    port: Port = Field(default=8000, description="Port of the HTTP API.")
    args: dict[str, JsonValue] = Field(
        default_factory=dict,
        description=(
            "Further flags of `vllm serve` without their dashes: `max-model-len: 131072`. `true` "
            "and `false` switch a flag on and off, a mapping becomes JSON, an empty value leaves "
            "vLLM's default. Underscores are read as dashes."
        ),
    )
    stall_timeout: Count = Field(
        default=1800,
        description=(
            "Seconds without a new line in the server's log after which a launch gives up. However "
            "long loading takes, a launch goes on while there is progress."
        ),
    )

    @field_validator("args", mode="before")
    @classmethod
    def _kebab_case(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        raise_if_any(list(flag_problems(list(value))))
        return {key.replace("_", "-"): argument for key, argument in value.items()}


class Invariants(Section):
    """What is watched while stages serve: that all ranks compute one and the same model.

    Every rank saw the same step, the first stage embedded the drafts that the last one verified,
    what leaves a stage is equal on all its ranks, and sparse-attention indices are of this step and
    stage. On the server's `/metrics`: `mtppp_invariant_checks_total`, and
    `mtppp_invariant_violations_total`, which stays 0 while all is well; otherwise `mtppp status`
    says so, too. Every five samples are judged together, every 35 steps where nothing is said: what
    a burst of fewer steps showed is counted with the next requests'. Not with data parallelism,
    which a launch and `mtppp status` say.
    """

    on_violation: Literal["count", "stop"] = Field(
        default="count",
        description=(
            "`count` logs and counts a violation and serves on; `stop` ends the engine, so that no "
            "further wrong token is served."
        ),
    )
    sample_every: Annotated[StrictInt, Field(ge=0)] = Field(
        default=7,
        description=(
            "Steps from one that is looked at to the next; 0 watches nothing. A look costs a few "
            "checksums and no waiting. Best no multiple of the number of stages, which take turns."
        ),
    )


class Verify(Section):
    """What a launch ends with: whether the deployment gives the model that it should.

    Until then requests of others are answered with 503, `/metrics` alone excepted. By a baseline
    the whole smoke tier is asked, which gives a verdict. Where none is named, the model scores a
    few short answers of its own, which sees gross faults of decoding and no others.
    """

    enabled: bool = Field(
        default=True,
        description=(
            "`false` ends a launch with the first tokens, and holds no requests; `status` says so."
        ),
    )
    baseline: OperatorPath | None = Field(
        default=None,
        description="A directory that `mtppp baseline record` has made, relative to the file.",
    )
    baseline_url: (
        Annotated[str, matching(r"https?://[^\s/]+(/.*)?", "a URL such as http://10.0.0.9:8000")]
        | None
    ) = Field(
        default=None,
        description=(
            "In its place a server with the same weights, tensor parallelism only, no drafts. Its "
            "key is read from `MTPPP_BASELINE_KEY`."
        ),
    )
    on_fail: Literal["stop", "keep-gated", "keep"] = Field(
        default="stop",
        description=(
            "On FAIL, `stop` ends the deployment again, `keep-gated` leaves it to be looked at and "
            "goes on holding requests, `keep` serves them at your own risk; exit status 1 each."
        ),
    )
    on_inconclusive: Literal["keep-gated", "keep"] = Field(
        default="keep-gated",
        description=(
            "The same where there is no verdict; exit status 3. Launched again, the deployment is "
            "verified again; `mtppp open` serves at your own risk."
        ),
    )

    @property
    def has_baseline(self) -> bool:
        """Whether there is something to compare with."""
        return self.baseline is not None or self.baseline_url is not None

    @model_validator(mode="after")
    def _one_baseline(self) -> Self:
        if self.baseline is not None and self.baseline_url is not None:
            raise FieldErrors([Problem((), "has both baseline and baseline_url; remove one")])
        if self.has_baseline and not self.enabled:
            raise FieldErrors([Problem(("enabled",), "is false, and yet a baseline is named")])
        return self


class Ray(Section):
    """The Ray cluster that mtppp starts on the nodes for this deployment alone."""

    base_port: Annotated[StrictInt, Field(ge=1024, le=MAX_PORT - PORTS_PER_NODE + 1)] = Field(
        default=26300,
        description=(
            "First of the block of 100 ports that Ray uses on each node. Local nodes share a "
            "machine: the second has the block after it, and so on. Best below 32768, where Linux "
            "begins to hand out ports of its own accord."
        ),
    )
    object_store_memory: Annotated[StrictInt, Field(ge=75 * 1024**2)] | None = Field(
        default=None, description="Bytes of shared memory for Ray's object store on each node."
    )


Name = Annotated[
    str,
    matching(
        r"[a-z0-9][a-z0-9.-]{0,39}",
        'at most 40 of the characters a-z, 0-9, "." and "-", the first a letter or a digit',
    ),
]


class Cluster(Section):
    """One deployment: a model, the nodes it runs on and how."""

    name: Name = Field(
        description=(
            "The deployment's name; directories on the nodes and the placement group are called "
            "after it. At most 40 characters: Unix sockets lie below those directories."
        )
    )
    model: Model = Field(description=str(Model.__doc__))
    ssh: Ssh = Field(default_factory=Ssh, description=str(Ssh.__doc__))
    gpus_per_node: Count | None = Field(
        default=None, description="`gpus` of every node that has none."
    )
    gpu_type: GpuName | None = Field(
        default=None, description="`gpu_type` of every node that has none."
    )
    nodes: tuple[Node, ...] = Field(
        description=(
            "The hosts in pipeline order: the first has stage 0 and the API server, the last has "
            "the last stage and the drafter."
        )
    )
    runtime: Runtime = Field(description=str(Runtime.__doc__))
    parallel: Parallel = Field(default_factory=Parallel, description=str(Parallel.__doc__))
    speculative: Speculative | None = Field(default=None, description=str(Speculative.__doc__))
    ray: Ray = Field(default_factory=Ray, description=str(Ray.__doc__))
    serve: Serve = Field(
        default_factory=Serve, validate_default=True, description=str(Serve.__doc__)
    )
    invariants: Invariants = Field(
        default_factory=Invariants,
        description="What is watched while stages serve: that all ranks compute one model.",
    )
    verify: Verify = Field(
        default_factory=Verify,
        description="What a launch ends with: whether it gives the model that it should.",
    )
    at_own_risk: tuple[str, ...] = Field(
        (),
        description=(
            "Codes of refusals to go ahead in spite of, as the refusal names them. Such a "
            "deployment is not proven to be right; `status` and every report say so."
        ),
    )
    recovery: Literal["everything", "missing"] = Field(
        default="everything",
        description=(
            "What `mtppp launch` does with a deployment that had been launched and of which a part "
            "has ended. `everything` stops what is left and starts all of it anew. `missing` lets "
            "Ray live on where it lives: the server is started anew with its ranks, which live and "
            "die together, and so is Ray of nodes that have lost it. Where the first node's Ray "
            "has ended, or something hangs, everything is restarted all the same, and the launch "
            "says so."
        ),
    )
    protect: bool = Field(
        default=False,
        description=(
            "Whether `mtppp stop`, and `mtppp launch` where it would stop what runs, want the "
            "deployment's name typed, or given with `--yes NAME`."
        ),
    )
    secrets: tuple[str, ...] = Field(
        default=(),
        description=(
            "Environment variables that the operator's environment holds and that vLLM needs, such "
            "as `HF_TOKEN`. Names only; the values never appear in a file, a log or an argument."
        ),
    )

    @field_validator("nodes", mode="before")
    @classmethod
    def _expand_nodes(cls, nodes: object, info: ValidationInfo) -> object:
        if not isinstance(nodes, list | tuple):
            return nodes
        if not nodes:
            raise ValueError("must not be empty")
        # An invalid gpus_per_node is not in `data`; the nodes are not to blame for it.
        defaults = {
            "gpus": info.data.get("gpus_per_node", MAX_COUNT),
            "gpu_type": info.data.get("gpu_type"),
        }
        return [_expand_node(node, defaults) for node in nodes]

    @field_validator("nodes")
    @classmethod
    def _distinct_nodes(cls, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        raise_if_any(
            [
                *_repeated(nodes, "host", lambda node: node.host.lower()),
                *_repeated(nodes, "address", lambda node: node.address),
                *_unreachable_loopback(nodes),
            ]
        )
        return nodes

    @field_validator("parallel")
    @classmethod
    def _enough_gpus(cls, parallel: Parallel, info: ValidationInfo) -> Parallel:
        if (nodes := info.data.get("nodes")) is None:
            return parallel
        wanted, had = parallel.tensor * parallel.pipeline, sum(node.gpus for node in nodes)
        if wanted > had:
            raise ValueError(
                f"tensor {parallel.tensor} times pipeline {parallel.pipeline} needs {wanted} GPUs; "
                f"the nodes have {had}"
            )
        return parallel

    @field_validator("ray")
    @classmethod
    def _ports_exist(cls, ray: Ray, info: ValidationInfo) -> Ray:
        if nodes := info.data.get("nodes"):
            last = _ray_ports(ray, nodes)[-1]
            if last > MAX_PORT:
                message = f"the local nodes' ports would end at {last}, above {MAX_PORT}"
                raise FieldErrors([Problem(("base_port",), message)])
        return ray

    @field_validator("serve")
    @classmethod
    def _port_not_rays(cls, serve: Serve, info: ValidationInfo) -> Serve:
        if "nodes" in info.data and "ray" in info.data:
            ports = _ray_ports(info.data["ray"], info.data["nodes"])
            if serve.port in ports:
                message = f"ports {ports[0]} to {ports[-1]}, from ray.base_port on, are Ray's"
                raise FieldErrors([Problem(("port",), f"{message}; is {serve.port}")])
        return serve

    @field_validator("secrets", mode="before")
    @classmethod
    def _names_alone(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, list | tuple):
            raise_if_any(list(secret_problems(value)))
        return value

    @model_validator(mode="after")
    def _secret_or_plain(self) -> Self:
        raise_if_any(
            [
                Problem(("runtime", "env", name), "is also under secrets; remove one of the two")
                for name in self.runtime.env
                if name in self.secrets
            ]
        )
        return self


def _ray_ports(ray: Ray, nodes: Sequence[Node]) -> range:
    """The ports of all nodes. A local node has the block that belongs to its place in the file."""
    last_local = max((i for i, node in enumerate(nodes) if node.transport == "local"), default=0)
    return range(ray.base_port, ray.base_port + (last_local + 1) * PORTS_PER_NODE)


def _expand_node(node: object, defaults: Mapping[str, object]) -> object:
    if isinstance(node, str):
        user, at, host = node.rpartition("@")
        node = {"user": user, "host": host} if at else {"host": host}
    if not isinstance(node, dict):
        return node
    missing = {key: value for key, value in defaults.items() if node.get(key) is None}
    return node | {key: value for key, value in missing.items() if value is not None}


def _repeated(
    nodes: Sequence[Node], key: str, identity: Callable[[Node], str]
) -> Iterator[Problem]:
    first: dict[str, int] = {}
    for i, node in enumerate(nodes):
        earlier = first.setdefault(identity(node), i)
        if earlier != i:
            yield Problem((i, key), f"the same as nodes[{earlier}].{key}: {getattr(node, key)}")


def _unreachable_loopback(nodes: Sequence[Node]) -> Iterator[Problem]:
    loopback = [ipaddress.ip_address(node.address).is_loopback for node in nodes]
    if all(loopback):
        return
    for i, node in enumerate(nodes):
        if loopback[i]:
            message = f"{node.address} is a loopback address, which the other hosts cannot reach"
            yield Problem((i, "address"), message)
