"""The compiler that Triton wants of a backend. There is nothing to compile for the interpreter."""

from types import ModuleType
from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend, GPUTarget


class InterpreterBackend(BaseBackend):
    """Supports no target, so Triton refuses a kernel that would have to be compiled."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return False

    def hash(self) -> NoReturn:
        raise NotImplementedError

    def parse_options(self, options: dict[str, Any]) -> NoReturn:
        raise NotImplementedError

    def add_stages(self, stages: dict[str, Any], options: object, language: Any) -> NoReturn:
        raise NotImplementedError

    def load_dialects(self, context: Any) -> NoReturn:
        raise NotImplementedError

    def get_module_map(self) -> dict[str, ModuleType]:
        raise NotImplementedError
