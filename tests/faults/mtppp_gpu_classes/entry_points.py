"""The entry points of this package."""

from collections.abc import Mapping

ENTRY_POINTS: Mapping[str, Mapping[str, str]] = {
    "vllm.general_plugins": {"mtppp_gpu_classes": "mtppp_gpu_classes.classes:register"},
}
"""Entry-point group -> name -> value, as in `entry_points.txt`."""
