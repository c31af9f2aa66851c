"""Flags of a command become keys of the file, one method for each that means something."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mtppp.cluster.managed import MANAGED_FLAGS, flag_problems
from mtppp.errors import ConfigurationError
from mtppp.importer.draft import Draft
from mtppp.importer.flags import Given, Parsed, values_of

_MTP_NAMES = frozenset(
    {
        *("mtp", "deepseek_mtp", "ernie_mtp", "exaone_moe_mtp", "glm4_moe_lite_mtp"),
        *("glm4_moe_mtp", "glm_ocr_mtp", "longcat_flash_mtp", "mimo_mtp", "nemotron_h_mtp"),
        *("pangu_ultra_moe_mtp", "qwen3_5_mtp", "qwen3_next_mtp", "step3p5_mtp"),
    }
)
"""What vLLM takes for "mtp"; the longer ones are its former names."""


class FlagTaker:
    """Takes the flags of a command over into a draft, one method for each that means something."""

    def __init__(self, draft: Draft, parsed: Parsed) -> None:
        self.draft = draft
        self.parsed = parsed
        self._takers: Mapping[str, Callable[[Given], None]] = {
            "api-key": self._secret_flag("VLLM_API_KEY"),
            "async-scheduling": self._async_scheduling,
            "distributed-executor-backend": self._executor,
            "enable-eplb": self._eplb,
            "hf-token": self._secret_flag("HF_TOKEN"),
            "kv-transfer-config": self._transfer,
            "max-model-len": self._max_model_len,
            "pipeline-parallel-size": self._size("pipeline"),
            "port": self._port,
            "revision": self._revision,
            "scheduler-cls": self._scheduler,
            "served-model-name": self._served_name,
            "spec-method": lambda given: None,
            "spec-model": lambda given: None,
            "spec-tokens": lambda given: None,
            "speculative-config": lambda given: None,
            "tensor-parallel-size": self._size("tensor"),
        }

    def take_all(self) -> None:
        for name in self.parsed.repeated:
            kept = self.parsed.flags[name]
            self.draft.note(
                "warning", f"--{name}", f"given more than once; the last counts: {kept.value!r}"
            )
        for given in self.parsed.flags.values():
            self._take(given)
        self._speculation()
        self._data_parallel()

    def _take(self, given: Given) -> None:
        draft = self.draft
        managed = MANAGED_FLAGS.get(given.name)
        if taker := self._takers.get(given.name):
            if given.unknown and given.name not in ("api-key", "hf-token"):
                raise no_value(given.written, f"--{given.name}", given.unknown)
            taker(given)
        elif managed is not None:
            draft.note("moved", f"--{given.name}", managed)
        elif given.name.startswith("data-parallel"):
            return
        elif given.unknown:
            raise no_value(given.written, f"--{given.name}", given.unknown)
        else:
            if not given.known and any(flag_problems([given.name])):
                raise ConfigurationError(
                    f"{given.written}: no vLLM that mtppp knows has such a flag, and the file "
                    "cannot have it as it is written",
                    hint="correct the command and import again",
                )
            draft.args[given.name] = given.value
            if not given.known:
                draft.comments["serve", "args", given.name] = "not a flag mtppp knows; passed on"
                draft.note(
                    "kept", given.written, "no vLLM that mtppp knows has such a flag; passed on"
                )

    def _size(self, name: str) -> Callable[[Given], None]:
        def take(given: Given) -> None:
            if not isinstance(given.value, int) or given.value < 1:
                raise ConfigurationError(f"{given.written}: must be at least 1")
            setattr(self.draft, name, given.value)

        return take

    def _secret_flag(self, variable: str) -> Callable[[Given], None]:
        def take(given: Given) -> None:
            self._add_secret(variable)
            self.draft.note(
                "changed",
                f"--{given.name}",
                f"everybody on the node can read a command line; {variable} is under secrets now: "
                "export it where you run mtppp",
            )

        return take

    def _add_secret(self, variable: str) -> None:
        if variable not in self.draft.secrets:
            self.draft.secrets.append(variable)

    def _async_scheduling(self, given: Given) -> None:
        if given.value:
            self.draft.note("moved", "--async-scheduling", "always on under mtppp")
            return
        self.draft.note("changed", "--no-async-scheduling", MANAGED_FLAGS["no-async-scheduling"])

    def _executor(self, given: Given) -> None:
        if given.value != "ray":
            reason = MANAGED_FLAGS["distributed-executor-backend"]
            self.draft.note("changed", f"--{given.name} {given.value}", reason)

    def _eplb(self, given: Given) -> None:
        if given.value:
            self.draft.args[given.name] = True

    def _transfer(self, given: Given) -> None:
        role = given.value.get("kv_role") if isinstance(given.value, dict) else None
        if role in ("kv_producer", "kv_consumer"):
            half = "prefill" if role == "kv_producer" else "decode"
            self.draft.cannot(
                f"--kv-transfer-config with {role}: this is the {half} half of a disaggregated "
                "pair, and mtppp deploys one engine that does both",
                "leave out --kv-transfer-config",
            )
        self.draft.args[given.name] = given.value
        self.draft.note(
            "warning",
            f"--{given.name}",
            "moving KV out of the engine has not been examined with pipeline parallelism and MTP",
        )

    def _max_model_len(self, given: Given) -> None:
        if given.value != "auto":
            self.draft.args[given.name] = given.value
            return
        self.draft.note(
            "changed",
            "--max-model-len auto",
            "left out: mtppp plans the memory of every stage for a number",
        )

    def _port(self, given: Given) -> None:
        self.draft.port = given.value

    def _revision(self, given: Given) -> None:
        self.draft.revision = str(given.value)

    def _scheduler(self, given: Given) -> None:
        self.draft.cannot(
            f"--scheduler-cls {given.value}: pipeline parallelism with MTP is right under vLLM's "
            "own asynchronous scheduler only",
            "leave out --scheduler-cls",
        )

    def _served_name(self, given: Given) -> None:
        first, *others = values_of(given)
        self.draft.served_name = first
        if others:
            self.draft.note(
                "changed",
                "--served-model-name",
                f"the file has one name, {first}; left out: {', '.join(others)}",
            )

    def _speculation(self) -> None:
        config = self._speculative_config()
        if config is None:
            return
        method, tokens = config.get("method"), config.get("num_speculative_tokens")
        other = config.get("model") not in (None, self.draft.model)
        if method is None:
            method = "draft_model" if other else "mtp"
        if str(method) not in _MTP_NAMES or other:
            drafter = f" with {config['model']}" if other else ""
            self.draft.cannot(
                f"speculative method {method}{drafter}: mtppp deploys the model's own MTP layers "
                "(method mtp) and no other drafter; under pipeline parallelism none is proven",
                """--speculative-config '{"method": "mtp", "num_speculative_tokens": 3}', """
                "or leave it out",
            )
            return
        if method != "mtp":
            self.draft.note("moved", f"method {method}", "vLLM's name for it today is mtp")
        if not isinstance(tokens, int) or tokens < 1:
            raise ConfigurationError(
                "--speculative-config has no num_speculative_tokens",
                hint="""--speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'""",
            )
        self.draft.tokens = tokens
        known = {"method", "model", "num_speculative_tokens"}
        for key in sorted(config.keys() - known):
            self.draft.note(
                "changed",
                f"speculative-config: {key}",
                f"left out ({config[key]!r}): the file has no place for it",
            )

    def _speculative_config(self) -> dict[str, Any] | None:
        flags = self.parsed.flags
        config: dict[str, Any] = {}
        if given := flags.get("speculative-config"):
            if not isinstance(given.value, dict):
                raise ConfigurationError(f"--speculative-config: not JSON: {given.value}")
            config |= given.value
        named = {"method": "spec-method", "model": "spec-model"}
        config |= {key: flags[name].value for key, name in named.items() if name in flags}
        if "spec-tokens" in flags:
            config["num_speculative_tokens"] = flags["spec-tokens"].value
        return config or None

    def _data_parallel(self) -> None:
        size = self.parsed.flags.get("data-parallel-size")
        if size is None or size.value == 1:
            return
        layout = (
            "the expert layers spread over its ranks" if self._spreads_experts() else "replicas"
        )
        self.draft.cannot(
            f"data parallel {size.value}: mtppp deploys one engine of tensor x pipeline GPUs, not "
            f"{layout}",
            "--tensor-parallel-size and --pipeline-parallel-size alone; replicas are deployments "
            "of their own",
        )

    def _spreads_experts(self) -> bool:
        given = self.parsed.flags.get("enable-expert-parallel")
        return given is not None and bool(given.value)


def no_value(where: str, what: str, unknown: Sequence[str]) -> ConfigurationError:
    name = re.sub(r"[^A-Za-z0-9_]", "", unknown[0].partition(":")[0]) or "NAME"
    return ConfigurationError(
        f"{where}: {what}: {', '.join(unknown)} has no value",
        hint=f"--set {name}=VALUE gives it one",
    )
