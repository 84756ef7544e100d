"""Harmless differences: the run is accepted, with nothing loosened to let it through."""

from __future__ import annotations

from pathlib import Path

import pytest

MODULE = Path(__file__).parent / "module_ports.py"
SHORT = ("--set", "scope.max_length_tokens=73")


@pytest.fixture(scope="module")
def accepted(verify, tiny_model):
    """Return `accepted(model, port)`, which holds a port against its model through text, and asserts acceptance."""

    def run(model: str, port: str) -> None:
        reference = tiny_model(model)
        if port.startswith("?"):
            port = (f"{MODULE}:port" if "benign=" in port else reference) + port
        verify(port, *SHORT, stage="text", reference=reference).accepted()

    return run


@pytest.fixture(scope="module")
def recorded(accepted):
    """The reference recorded without a switch, and its twin accepted."""
    accepted("qwen3_moe", "?attn=sdpa")


def test_eager_attention_is_accepted(accepted):
    """The reference attends with sdpa, the port with eager."""
    accepted("qwen3_moe", "?attn=eager")


def test_another_way_through_the_experts_is_accepted(recorded, accepted):
    """Experts one after the other instead of in groups."""
    accepted("qwen3_moe", "?experts=eager")


def test_compiled_layers_are_accepted(accepted):
    """Each layer through a compiler's front end; a dense model, since routes inside a compiled layer cannot be seen."""
    accepted("llama", "?compile=aot_eager")


@pytest.mark.parametrize(
    ("variable", "value"),
    [("ATEN_CPU_CAPABILITY", "default"), ("ONEDNN_MAX_CPU_ISA", "AVX2")],
)
def test_another_instruction_set_is_accepted(recorded, accepted, monkeypatch, variable, value):
    """The port's process uses other kernels than the one that recorded the reference."""
    monkeypatch.setenv(variable, value)
    accepted("qwen3_moe", "?attn=sdpa")


def test_rounding_elsewhere_is_accepted(accepted):
    """Every norm rounds once, at the end."""
    accepted("qwen3_moe", "?benign=norm_rounded_first")


def test_masked_columns_beyond_the_vocabulary_are_accepted(recorded, accepted):
    """Logits padded for tiles, the padding masked."""
    accepted("qwen3_moe", "?benign=padded_vocabulary")
