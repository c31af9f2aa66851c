"""Stages that would attend with another stage's indices, judged inside a release of vLLM.

    PYTHON_OF_A_RELEASE index_world.py

prints one JSON object per experiment: whether the release's own rules make the layers share that
`index_share` takes for sharing, and whether its EngineCore and worker wrapper, patched by the
plugin, refuse GLM-5.2's illegal cuts and let its legal ones pass.
"""

from __future__ import annotations

import ast
import json
import os
import random
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches"))

from mtppp_patches.engine_spec import (
    DEPLOYMENT_VARIABLE,
    SPEC_VARIABLE,
    EngineSpec,
)
from mtppp_patches.index_share import layers_read
from mtppp_patches.patch import PatchError, names_needed
from mtppp_patches.plugin import register
from mtppp_patches.registry import PATCHES

Config = dict[str, Any]
Skips = Callable[[Any, int], bool]

GLM: Config = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_topk_pattern": None,
}
CUTS = ("", "40,38", "42,36", "38,40")
"""Values of VLLM_PP_LAYER_PARTITION; "" is vLLM's own split, 39/39."""


def main() -> int:
    root = Path(str(find_spec("vllm").origin)).parent  # type: ignore[union-attr]
    for source, family, skips in rules(root):
        configs = [GLM, *random_configs()]
        chosen = [config for config in configs if config["model_type"] == family]
        differ = [c for c in chosen if sharing(c) != shared_by_vllm(c, skips)]
        print(
            json.dumps(
                {
                    "experiment": "rules",
                    "family": family,
                    "source": source,
                    "configs": len(chosen),
                    "sharing_layers": sum(len(sharing(config)) for config in chosen),
                    "differ": differ,
                }
            ),
            flush=True,
        )
    for line in refusals():
        print(json.dumps({"experiment": "refusals", "family": "glm_moe_dsa", **line}), flush=True)
    sys.stdout.flush()
    # vLLM has started threads that would keep the process.
    os._exit(0)


def sharing(config: Config) -> list[int]:
    """The layers that use another's indices, by our rules."""
    return [layer for layer, source in enumerate(layers_read(config)) if source != layer]


def shared_by_vllm(config: Config, skips: Skips) -> list[int]:
    """The same by vLLM's; a layer that shares before any computed has nothing to lose by a cut."""
    published = types.SimpleNamespace(**config)
    layers = range(config["num_hidden_layers"])
    shared = [layer for layer in layers if skips(published, layer)]
    first = min(set(range(len(layers) + 1)) - set(shared))
    return [layer for layer in shared if layer > first]


def rules(root: Path) -> Iterator[tuple[str, str, Skips]]:
    """(file, model_type, rule) of this release: vLLM's own statements, cut out and compiled."""
    for path, owner in (
        ("model_executor/models/deepseek_v2.py", "DeepseekV2MLAAttention"),
        ("models/deepseek_v32/attention.py", "DeepseekV32Attention"),
    ):
        if (root / path).exists():
            yield path, "glm_moe_dsa", statements_of(root / path, owner)
    path = "models/hy_v4/nvidia/attention.py"
    if (root / path).exists():
        [shared_of_hy] = defined(root / path, "compute_skip_topk_layers")
        yield path, "hy_v4", lambda config, layer: layer in shared_of_hy(config)
    path = "models/minimax_m3/amd/model.py"
    # In 0.24.0 the layers of this model do not share.
    if (root / path).exists() and "index_topk_freq" in (root / path).read_text(encoding="utf-8"):
        names = ("_sparse_attention_layer_ids", "_sparse_attention_layer_ordinals")
        *_, skips_of_minimax = defined(root / path, *names, "_should_skip_index_topk")
        yield path, "minimax_m3_text", skips_of_minimax


def statements_of(path: Path, owner: str) -> Skips:
    """The statements of a constructor that decide whether its layer shares."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    [attention] = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == owner]
    decide = {"index_topk_freq", "index_topk_pattern", "index_skip_topk_offset", "skip_topk"}
    decide |= {f"_{name}" for name in decide}

    def sets(node: ast.AST) -> set[str]:
        stored = (n for n in ast.walk(node) if isinstance(n, ast.Name))
        return {n.id for n in stored if isinstance(n.ctx, ast.Store)}

    def deciding(body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for node in body:
            if sets(node) and sets(node) <= decide:
                yield node
            else:
                yield from deciding(getattr(node, "body", []))

    nodes = [*deciding(attention.body)]
    assert len(nodes) in (4, 5), [ast.unparse(node) for node in nodes]
    code = compile(ast.Module(nodes, []), str(path), "exec")

    def skips(config: Any, layer: int) -> bool:
        space: dict[str, Any] = {"config": config, "layer_id": layer}
        exec(code, space)
        return bool(space.get("skip_topk", space.get("_skip_topk")))

    return skips


def defined(path: Path, *names: str) -> list[Any]:
    """Functions of a module that cannot be imported without a GPU."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in names]
    space: dict[str, Any] = {"PreTrainedConfig": object, "PretrainedConfig": object}
    exec(compile(ast.Module([*nodes], []), str(path), "exec"), space)
    return [space[name] for name in names]


def random_configs() -> Iterator[Config]:
    numbers = random.Random(1)
    for _ in range(30):
        layers = numbers.randint(2, 20)
        schedule = {
            "num_hidden_layers": layers,
            "index_topk": 8,
            "index_topk_freq": numbers.randint(1, 5),
            "index_skip_topk_offset": numbers.randint(0, 4),
        }
        pattern = "F" + "".join(numbers.choices("FS", k=layers - 1))
        kinds = ["full", *numbers.choices(["full", "shared"], k=layers - 1)]
        frequencies = numbers.choices([0, 1], k=layers)
        yield {**schedule, "model_type": "glm_moe_dsa", "index_topk_pattern": None}
        yield {**schedule, "model_type": "glm_moe_dsa", "index_topk_pattern": pattern}
        yield {
            **schedule,
            "model_type": "hy_v4",
            "indexer_types": kinds,
            "layer_types": ["sparse"] * layers,
        }
        yield {
            **schedule,
            "model_type": "minimax_m3_text",
            "use_index_cache": True,
            "sparse_attention_config": {"sparse_attention_freq": frequencies},
        }


def refusals() -> Iterator[dict[str, Any]]:
    """What a patched engine core and its workers say to each cut."""
    from vllm.version import __version__

    release = __version__.partition("+")[0]
    spec = EngineSpec(release, "glm_moe_dsa", device="cpu", pipeline=2)
    spec = replace(spec, patches=names_needed(PATCHES, spec))
    os.environ.update({DEPLOYMENT_VARIABLE: "test", SPEC_VARIABLE: spec.to_json()})
    register()

    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    class StartedError(Exception):
        """Whoever raises this would have gone on."""

    def start(*_: Any) -> None:
        raise StartedError

    def outcome(begin: Callable[[], object]) -> str:
        try:
            begin()
        except PatchError as error:
            return str(error)
        except StartedError:
            pass
        return "starts"

    with tempfile.TemporaryDirectory() as directory:
        published = {
            **GLM,
            "architectures": ["GlmMoeDsaForCausalLM"],
            "first_k_dense_replace": 3,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
        }
        Path(directory, "config.json").write_text(json.dumps(published))
        config = EngineArgs(
            directory,
            skip_tokenizer_init=True,
            pipeline_parallel_size=2,
            max_model_len=64,
            dtype="bfloat16",
            distributed_executor_backend="mp",
        ).create_engine_config()
    for cut in CUTS:
        os.environ.pop("VLLM_PP_LAYER_PARTITION", None)
        if cut:
            os.environ["VLLM_PP_LAYER_PARTITION"] = cut
        workers = []
        for stage in range(2):
            parallel_state._PP = types.SimpleNamespace(rank_in_group=stage)
            wrapper = WorkerWrapperBase.__new__(WorkerWrapperBase)
            wrapper.vllm_config = config
            wrapper._worker_extension_cls = None  # Of 0.33; the constructor is not called.
            wrapper.worker = types.SimpleNamespace(init_device=lambda: None)
            workers.append(outcome(wrapper.init_device))
        engine = outcome(lambda: EngineCore(config, start, log_stats=False))
        yield {"partition": cut or "39,39 (vLLM's own)", "engine": engine, "workers": workers}


if __name__ == "__main__":
    sys.exit(main())
