"""`python -m faulty_mtppp`: the command, with the plugin of faults among those that it ships."""

from __future__ import annotations

from collections.abc import Sequence

from mtppp.cli.main import main
from mtppp.phases import deployment
from mtppp.plan.plugins import PluginBundle, bundle


def _with_faults(packages: Sequence[str]) -> PluginBundle:
    return bundle(["mtppp_faults", *packages])


if __name__ == "__main__":
    deployment.bundle = _with_faults
    main()
