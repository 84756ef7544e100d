"""A model of transformers on the small device through the real command: accepted, refused, out of memory."""

from __future__ import annotations

import os
import shutil

import pytest

COMPILER = os.environ.get("CXX") or "g++"
pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C++ compiler {COMPILER!r} to build it with")


@pytest.fixture
def verified(verify, tiny_model):
    """Return `verified(stage, options)`: the model with experts on the device against itself on the CPU."""
    model = tiny_model("qwen3_moe")
    return lambda stage, options="": verify(f"{model}?device=pocket:1{options}", stage=stage, reference=model)


def test_the_right_device_is_accepted_and_its_operators_are_told(verified):
    """Startup and text accept the device; the page has who serves each operator, what falls back, and the runtime."""
    outcome = verified("startup,text")
    outcome.accepted()
    table = next(s["facts"]["operators"] for s in outcome.results["stages"] if s["name"] == "startup")
    levels = {row["operator"]: row["level"] for row in table["rows"]}
    assert levels["aten::mm"] == levels["aten::topk"] == "library"
    assert levels["aten::embedding"] == "host"
    assert table["decode_counted"]
    assert table["fallbacks"]["aten::embedding"] == 1
    assert set(table["runtime"]["checks"].values()) == {""}
    page = (outcome.out / "02-startup.md").read_text()
    assert "| aten::embedding | places | host | 1 | 1 | 1 (index_select) |" in page
    assert "- runtime, as promised: allocated, peak, streams, events, pinned, back, out_of_memory" in page


def test_a_wrong_kernel_is_named_alone_and_on_the_models_own_input(verified):
    """The run ends at startup; the suite names operator and pattern, the shadow its module, its input and a script."""
    outcome = verified("startup", "&device_breaks=topk_last")
    outcome.refused_at("startup")
    found = {f["tap"]: f for f in outcome.findings("startup")}
    assert {"operators.topk", "shadow.aten.topk"} <= set(found)
    assert "only the last index of a row" in found["operators.topk"]["cause"]
    assert found["shadow.aten.topk"]["module"] == "model.layers.0.mlp.gate"
    assert "replay.py" in found["shadow.aten.topk"]["message"]
    assert set(outcome.broken("startup")) == {"startup.operators.indices", "startup.shadow.places"}


@pytest.mark.parametrize(("gib", "stage"), [("0.0003", "load"), ("0.001", "startup")])
def test_out_of_memory_is_an_error_with_the_plan_beside_it(verified, gib, stage):
    """Where the card is too small the stage is an ERROR that has the plan by part; what was learned before stays."""
    outcome = verified("startup", f"&device_gib={gib}")
    first = outcome.refused_at(stage, status="ERROR")
    for words in (
        "OutOfMemoryError: pocket:1 is out of memory",
        "planned are",
        "weights in bfloat16",
        "experts",
        "cache",
    ):
        assert words in first["message"]
    if stage == "startup":
        table = next(s["facts"]["operators"] for s in outcome.results["stages"] if s["name"] == "startup")
        assert table["alone"]
