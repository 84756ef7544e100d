"""Ports that hold numbers in declared formats: what does as declared is accepted, its twin with a mistake is refused.

In one process, through the stages that concern them; the ports round by torch's own types.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.checklist import load_checklists
from harness.faults.lab import Judged, Subject, Traces, loaded, make_lab
from harness.plugins import open_adapter, parse_spec
from harness.runs import Bench
from harness.types import Setup

PORTS = Path(__file__).parent / "quantised_ports.py"
FP8_CACHE = {"cache": "float8_e4m3fn:tensor"}
W8A8 = {"weights": "int8:channel", "activations": "int8:token"}
FP8_BLOCKS = {"weights": "float8_e4m3fn:16x16"}


@pytest.fixture(scope="module")
def judged(tiny_model):
    """Return `judged(model, declared, hold, stage)`: how a stage judges a port; goldens are recorded once for each."""
    labs = {}

    def judge(model: str, declared: dict[str, str], hold: str, stage: str = "text") -> Judged:
        spec = f"{PORTS}:port?hold={hold}"
        key = model, *declared.items()
        if key not in labs:
            reference = tiny_model(model)
            folder = Path(reference.removeprefix("hf:"))
            subject = Subject(name=model, checkpoint=folder, reference=reference, accel=spec, precision=declared)
            labs[key] = make_lab(subject, load_checklists(None))
        lab = labs[key]
        made: dict[str, Bench] = {}

        def port(setup: Setup) -> Bench:
            if setup.dtype not in made:
                own, checkpoint = replace(setup, adapter=spec, options={"hold": hold}), lab.subject.checkpoint
                made[setup.dtype] = loaded(open_adapter(parse_spec(spec), checkpoint, own), checkpoint, own)
            return made[setup.dtype]

        traces: Traces = {}
        lab.record(port, stage, traces)
        return lab.judge(stage, traces)

    yield judge
    for lab in labs.values():
        lab.close()


def accepted(found: Judged) -> None:
    assert found.accepted, (found.broken(), found.findings[:3])


def refused(found: Judged) -> str:
    """Return the first wrong place of a stage that was refused."""
    assert not found.accepted
    assert found.findings, found.broken()
    return found.findings[0].tap


def test_an_fp8_cache_is_noise_where_it_is_declared(judged):
    """BN14: keys and values in E4M3 under any scale are accepted where the port says so, and refused where not."""
    for hold in ("cache_no_scale", "cache_by_key", "cache_from_file"):
        accepted(judged("llama", FP8_CACHE, hold))
    assert refused(judged("llama", {}, "cache_no_scale")) == "layers.0.attn.core"


def test_a_scale_that_is_not_delivered_is_no_noise(judged):
    """LC07: values written without a scale and read with one, or with one that is 3 % off in one layer."""
    assert refused(judged("llama", FP8_CACHE, "cache_not_delivered")) == "layers.0.attn.core"
    found = judged("llama", FP8_CACHE, "cache_half_delivered")
    assert refused(found) == "layers.1.attn.core"
    assert "scaled" in found.findings[0].cause


def test_a_scale_frozen_at_the_first_token_saturates(judged):
    """LC08: the declaration is of rounding; what is cut off is refused where it is cut."""
    assert refused(judged("llama", FP8_CACHE, "cache_frozen")) == "layers.1.attn.core"


def test_integer_products_are_noise_where_they_are_declared(judged):
    """W8A8: codes by row and by token, true integer products, are accepted; one halved scale is found twice over."""
    accepted(judged("llama", W8A8, "int8", "load"))
    accepted(judged("llama", W8A8, "int8"))
    assert refused(judged("llama", W8A8, "int8_halved", "load")) == "model.layers.1.mlp.down_proj.weight"
    assert refused(judged("llama", W8A8, "int8_halved")) == "layers.1.mlp.down_proj"


def test_block_scales_in_another_order_are_found_in_fused_experts(judged):
    """E4M3 under a grid of scales, fused experts too: a step of the format is free, a turned grid is not."""
    accepted(judged("qwen3_moe", FP8_BLOCKS, "fp8_blocks", "load"))
    accepted(judged("qwen3_moe", FP8_BLOCKS, "fp8_blocks"))
    found = judged("qwen3_moe", FP8_BLOCKS, "fp8_transposed", "load")
    assert refused(found).startswith("model.layers.1.mlp.")
    assert found.broken() == ["load.values"]


def test_weights_that_nobody_declared_are_refused(judged):
    """The same E4M3 weights without a word about them differ from the checkpoint."""
    found = judged("qwen3_moe", {}, "fp8_blocks", "load")
    assert "load.values" in found.broken()


@pytest.mark.slow
def test_a_state_is_stored_as_declared_and_no_narrower(judged):
    """SP19 and its twin: a bf16 state under wide updates is accepted where it is declared, an FP8 one in its place is
    refused in decode; a float16 state that nobody declared is seen where the port runs in float32.
    """
    declared = {"state": "bfloat16"}
    accepted(judged("qwen3_next", declared, "state_bf16"))
    found = judged("qwen3_next", declared, "state_fp8")
    assert refused(found) == "layers.0"
    assert "text.phases" in found.broken()
    found = judged("qwen3_next", {}, "state_fp16")
    assert "text.float32" in found.broken()
    assert refused(found) == "layers.0"
