"""What a launch does, in order."""

from __future__ import annotations

from mtppp.cluster import Cluster
from mtppp.phases.attest import Attest
from mtppp.phases.connect import Connect
from mtppp.phases.environment import MakeEnvironment
from mtppp.phases.facts import GatherFacts
from mtppp.phases.find_model import FindModel
from mtppp.phases.first_tokens import FirstTokens
from mtppp.phases.lock import TakeLocks
from mtppp.phases.make_plan import MakePlan
from mtppp.phases.phase import Phase
from mtppp.phases.ray_cluster import Place, StartRay
from mtppp.phases.record import Record
from mtppp.phases.running import CompareWithRunning
from mtppp.phases.serve import StartServer, WaitUntilReady
from mtppp.phases.ship import ShipPlugins
from mtppp.phases.verify import FindBaseline, SelfScore, Verify

LAUNCH: tuple[Phase, ...] = (
    FindModel(),
    Connect(),
    TakeLocks("launch"),
    MakeEnvironment(),
    GatherFacts(),
    MakePlan(),
    CompareWithRunning(),
    ShipPlugins(),
    StartRay(),
    Place(),
    StartServer(),
    WaitUntilReady(),
    Attest(),
    FirstTokens(),
    Record(),
)


def launch_phases(cluster: Cluster) -> tuple[Phase, ...]:
    """The steps of this launch, which ends with verifying as far as the file says."""
    if not cluster.verify.enabled:
        return LAUNCH
    if not cluster.verify.has_baseline:
        return (*LAUNCH, SelfScore())
    return (FindBaseline(), *LAUNCH, Verify())
