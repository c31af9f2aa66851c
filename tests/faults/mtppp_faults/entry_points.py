"""The entry points of this package; it must come first in its group."""

from collections.abc import Mapping

ENTRY_POINTS: Mapping[str, Mapping[str, str]] = {
    "vllm.general_plugins": {"mtppp_faults": "mtppp_faults.faults:register"},
}
"""Entry-point group -> name -> value, as in `entry_points.txt`."""
