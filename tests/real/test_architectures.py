"""Small random models of real architectures, with their real code, against themselves; a real one in another engine.

The other engine is here, and not beside its model's other tests, because the two files take equally long.
"""

from __future__ import annotations

import pytest

from harness.faults import models

TEXT_ONLY = ("deepseek_v32", "gpt_oss", "kimi_linear", "inkling2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


@pytest.mark.parametrize("name", [*TEXT_ONLY, "glm5_next"])
def test_an_architecture_is_accepted_against_itself(verify, folder, need, name):
    """Sparse attention, sinks, recurrent state, block residuals and images are judged right where they are right."""
    need("transformers")
    checkpoint = models.build(name, folder / name)
    outcome = verify(f"hf:{checkpoint}", f"hf:{checkpoint}?dtype=bfloat16")
    assert outcome.code == 0, outcome.complaints()
    assert outcome.stages["text"] == "PASSED"
    assert outcome.stages["long_context"] == "PASSED"
    assert outcome.stages["multi_card"] == "SKIPPED"
    if name == "glm5_next":
        assert outcome.stages["image"] == "PASSED"


def test_a_scaled_linear_is_refused_at_its_layer(verify, folder, need, tmp_path):
    """The twin that must fail: one matrix of one layer scaled by 3 %, and the first finding lies in that layer."""
    need("transformers")
    checkpoint = models.build("llama", folder / "llama")
    port = tmp_path / "port.py"
    port.write_text(
        "import torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "def factory(checkpoint, setup):\n"
        "    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)\n"
        "    original = model.model.layers[2].mlp.down_proj.forward\n"
        "    model.model.layers[2].mlp.down_proj.forward = lambda x: original(x) * 1.03\n"
        "    return model\n"
    )
    outcome = verify(f"hf:{checkpoint}", f"{port}:factory", "--stage", "text", "--no-keep-going")
    assert outcome.code == 1
    assert outcome.stages["text"] == "FAILED", outcome.complaints()
    findings = next(s["findings"] for s in outcome.results["stages"] if s["name"] == "text")
    assert findings[0]["tap"].startswith("layers.2")


def test_another_engine_is_accepted(verify, smollm2, need):
    """ONNX Runtime, whose graph cannot be replayed, is judged on its own recorded values and passes its four stages."""
    need("onnx", "onnxscript", "onnxruntime")
    outcome = verify(f"hf:{smollm2}", "examples/onnx_port.py:factory?dtype=float32")
    assert outcome.code == 0, outcome.complaints()
    four = dict.fromkeys(("load", "startup", "text", "long_context"), "PASSED")
    assert outcome.stages == {**four, "image": "SKIPPED", "multi_card": "SKIPPED"}
