"""A language model that nobody here wrote, against itself in another precision and in another engine."""

from __future__ import annotations

SKIPPED = {"image": "SKIPPED", "multi_card": "SKIPPED"}


def test_a_real_model_is_accepted_in_bfloat16(verify, smollm2):
    """SmolLM2 in bfloat16 passes the four stages in scope; the two outside it are skipped."""
    outcome = verify(f"hf:{smollm2}", f"hf:{smollm2}?dtype=bfloat16")
    assert outcome.code == 0, outcome.complaints()
    four = dict.fromkeys(("load", "startup", "text", "long_context"), "PASSED")
    assert outcome.stages == {**four, **SKIPPED}


def test_its_compiled_layers_are_accepted(verify, smollm2):
    """SmolLM2 in bfloat16 with every layer compiled passes as far as text; compiled layers show their outputs only."""
    outcome = verify(f"hf:{smollm2}", f"hf:{smollm2}?dtype=bfloat16&compile=aot_eager", "--stage", "text")
    assert outcome.code == 0, outcome.complaints()
    assert outcome.stages == {"load": "PASSED", "startup": "PASSED", "text": "PASSED"}
