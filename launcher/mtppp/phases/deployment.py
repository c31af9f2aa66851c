"""What the steps of one command share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from mtppp.cluster import Cluster, load
from mtppp.engine.client import EngineClient
from mtppp.errors import ConfigurationError, MtpppError
from mtppp.hosts.facts import HostFacts
from mtppp.hosts.node import Node
from mtppp.model.config import ModelConfig
from mtppp.model.facts import ModelFacts
from mtppp.phases.environment_maker import EnvironmentMaker
from mtppp.phases.reach import Way, find_way
from mtppp.plan.flags import FlagError
from mtppp.plan.plan import Command, NodePlan, Plan
from mtppp.plan.plugins import PluginBundle, bundle
from mtppp.plan.review import Review
from mtppp_patches.gate import KEY_HEADER


@dataclass
class Deployment:
    """One deployment while a command works on it.

    Attributes:
        cluster: what the file says.
        file: the file, as the operator named it.
        nodes: one for each node of the file, in its order.
        secrets: values of the file's `secrets`, from the operator's environment.
        config, model: the model's configuration and what it says; None until it was found.
        not_here: why the configuration could not be had on this side, if it could not.
        facts: of the hosts, in the same order; empty until they were asked.
        reviewed: the Plan and what is to be said of it; None until it was made.
        makers: of managed environments, in the order of the nodes; empty where there are none.
        unreachable: why nodes could not be reached, by index, where a command goes on without.
        running: whether processes of this deployment were found on a node.
        restart: whether what runs and is not as planned may be stopped.
        protected: whether nothing of it that runs may be stopped.
        adopted: whether all of it runs that a launch starts, which is then left out.
        living: nodes whose Ray lives on while what is missing is brought back, by index.
        finished: whether the steps that follow have nothing to do.
        gate_key: lets our requests through the server's gate; "" while it is not known.
        holding: whether requests of others are still held when all steps are done.
        exit_status: what the command ends with when all steps are done.
        report: what is to be shown at its end.
    """

    cluster: Cluster
    file: Path
    nodes: list[Node]
    secrets: Mapping[str, str] = field(default_factory=dict)
    config: ModelConfig | None = None
    model: ModelFacts | None = None
    not_here: MtpppError | None = None
    facts: list[HostFacts] = field(default_factory=list)
    reviewed: Review | None = None
    makers: list[EnvironmentMaker] = field(default_factory=list)
    unreachable: dict[int, MtpppError] = field(default_factory=dict)
    running: bool = False
    restart: bool = False
    protected: bool = False
    adopted: bool = False
    living: frozenset[int] = frozenset()
    finished: bool = False
    gate_key: str = ""
    holding: bool = False
    exit_status: int = 0
    report: Sequence[str] = ()
    _way: Way | None = None

    def close(self) -> None:
        """Close the connections to the nodes."""
        if self._way is not None:
            self._way.close()
        for node in self.nodes:
            node.transport.close()

    def engine(self, endpoint: str, *, timeout: float = 60.0) -> EngineClient:
        """A client of the server at `endpoint`, which runs on the first node.

        Args:
            timeout: seconds for one answer.

        Raises:
            HostError: the first node cannot be talked to.
        """
        forwarder = self.way(endpoint).forwarder
        return EngineClient(
            endpoint,
            timeout=timeout,
            headers={**self.authorization, **self.gate_header},
            forwarder=forwarder,
        )

    @property
    def authorization(self) -> dict[str, str]:
        """Headers that the server wants of its clients; none where no key is known."""
        key = self.secrets.get("VLLM_API_KEY")
        return {"Authorization": f"Bearer {key}"} if key else {}

    @property
    def gate_header(self) -> dict[str, str]:
        """The header that lets our own requests through a gate that is closed for others."""
        return {KEY_HEADER: self.gate_key} if self.gate_key else {}

    def way(self, endpoint: str) -> Way:
        """How HTTP gets to the server.

        Raises:
            HostError: the first node cannot be talked to.
        """
        if self._way is None:
            self._way = find_way(self.cluster.nodes[0], self.nodes[0].transport, endpoint)
        return self._way

    @property
    def reached(self) -> list[int]:
        """Indices of the nodes that are not unreachable."""
        return [index for index in range(len(self.nodes)) if index not in self.unreachable]

    @contextmanager
    def naming_lines(self) -> Iterator[None]:
        """Say of a flag that the Plan cannot read where it stands in the file."""
        try:
            yield
        except FlagError as error:
            try:
                source = load(self.file).source
            except ConfigurationError:  # not the file any more that the deployment is of
                raise error from None
            where = f"{source.path}:{source.line_of(error.key_path)}"
            raise ConfigurationError(f"{where}: {error.message}", hint=error.hint) from None

    @property
    def makes_environments(self) -> bool:
        """Whether a managed environment is being made on a node."""
        return any(maker.runs for maker in self.makers)

    @property
    def plan(self) -> Plan:
        """The Plan; it is a mistake of ours to ask before it was made."""
        assert self.reviewed is not None
        return self.reviewed.plan

    @cached_property
    def plugins(self) -> PluginBundle:
        """What is shipped to the nodes."""
        cpu = self.cluster.runtime.device == "cpu"
        return bundle(["mtppp_patches", "mtppp_cpu"] if cpu else ["mtppp_patches"])

    @property
    def members(self) -> list[tuple[Node, NodePlan]]:
        """Each node with its part of the Plan."""
        return list(zip(self.nodes, self.plan.nodes, strict=True))

    @property
    def head(self) -> tuple[Node, NodePlan]:
        """The first of `members`."""
        return self.members[0]

    def environment(self, command: Command) -> dict[str, str]:
        """The environment to start a command with: the planned one and the secrets."""
        return {**command.env, **self.secrets}
