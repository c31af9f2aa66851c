"""Collectives between CPU workers that may be on different hosts."""

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class CrossHostCommunicator(CpuCommunicator):
    """vLLM's CPU communicator, always over the network (gloo).

    vLLM uses shared memory where all ranks of a group compute the same name for it. The name is
    made of the port and ranks of the group, which ranks on different hosts agree on as well: they
    would wait for each other in memory that they do not share.
    """

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        return False
