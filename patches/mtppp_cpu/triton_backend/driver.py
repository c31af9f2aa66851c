"""The driver by which vLLM and Triton recognise that kernels can run here."""

from typing import TYPE_CHECKING, Any, NoReturn

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from mtppp_cpu import request

if TYPE_CHECKING:
    import torch


class InterpreterDriver(DriverBase):
    """Answers what is asked before a kernel runs; the interpreter asks nothing while it runs."""

    @classmethod
    def is_active(cls) -> bool:
        return request.is_active()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> "torch.device":
        import torch

        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> NoReturn:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError
