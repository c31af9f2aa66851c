from __future__ import annotations

import json

import pytest

from mtppp_patches.engine_spec import EngineSpec, InvalidSpecError, Speculative

SPEC = EngineSpec(
    release="0.32.0",
    model_type="glm_moe_dsa",
    tensor=8,
    pipeline=2,
    layer_partition=(42, 36),
    speculative=Speculative("mtp", 3),
    patches=("stage_boundary",),
    placement={"namespace": "mtppp", "group": "a"},
    at_own_risk=("unproven",),
)


def test_round_trip() -> None:
    assert EngineSpec.from_json(SPEC.to_json()) == SPEC
    plain = EngineSpec("0.32.0", "glm4_moe")
    assert EngineSpec.from_json(plain.to_json()) == plain


def test_the_text_is_canonical() -> None:
    assert EngineSpec.from_json(SPEC.to_json()).to_json() == SPEC.to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "different versions"),
        ({"colour": "red"}, "unknown keys: colour"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({"runner": "v3"}, "runner 'v3'"),
        ({"invariants": "maybe"}, "invariants 'maybe'"),
        ({"pipeline": 3}, "2 parts for 3"),
        ({"tensor": 0}, "tensor starts at 1"),
        ({"speculative": {"method": "mtp"}}, "tokens"),
    ],
)
def test_what_is_not_understood_is_refused(change: dict[str, object], message: str) -> None:
    text = json.dumps(json.loads(SPEC.to_json()) | change)
    with pytest.raises(InvalidSpecError, match=message):
        EngineSpec.from_json(text)


def test_not_json() -> None:
    with pytest.raises(InvalidSpecError, match="not JSON"):
        EngineSpec.from_json("{")


def test_release_is_needed() -> None:
    data = json.loads(SPEC.to_json())
    del data["release"]
    with pytest.raises(InvalidSpecError, match="release"):
        EngineSpec.from_json(json.dumps(data))
