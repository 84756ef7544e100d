from __future__ import annotations

from typing import Any

import pytest
import torch
from accel_runs import whole
from operator_inputs import ARGUMENTS, B, D, R, rand, scores, table

from accel_impl import backend, custom, fallback, library, ops
from accel_impl.backend import BackendAdapter
from harness.errors import SpecError
from harness.types import Case

LEVELS = [
    (name, level)
    for level in ("custom", "library")
    for name in ops.NAMES
    if BackendAdapter(prefer=level).table[name] == level
]


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_every_level_says_what_the_reference_says(name: str, level: str) -> None:
    """In float32 each operator of each level equals the reference up to the order of sums, what it changes included."""
    module = {"custom": custom, "library": library}[level]
    (args, kwargs), (same, _) = ARGUMENTS[name](), ARGUMENTS[name]()
    actual, expected = (getattr(m, ops.NAMES[name])(*a, **kwargs) for m, a in ((module, args), (fallback, same)))
    torch.testing.assert_close(actual, expected, atol=3e-6, rtol=3e-5)
    for one, other in zip(args, same, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, atol=3e-6, rtol=3e-5)


def test_no_operator_escapes_the_comparison() -> None:
    """Every operator has arguments to be compared with, and a reference to fall back to."""
    assert set(ARGUMENTS) == set(ops.NAMES)
    assert all(hasattr(fallback, function) for function in ops.NAMES.values())
    assert len(LEVELS) > 20


@pytest.mark.parametrize("name", ["residual.mix", "conv.causal", "index.scores", "index.select", "recurrent.prefill",
                                  "recurrent.decode"])  # fmt: skip
def test_custom_operators_keep_their_contract(name: str) -> None:
    """torch's own check of schema, fake kernel and aliasing holds for custom operators with plain arguments."""
    args, kwargs = ARGUMENTS[name]()
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(getattr(custom, ops.NAMES[name]), args, kwargs, test_utils=tests)


def test_attention_keeps_its_contract() -> None:
    """The same holds for both attentions, which take decoded weights."""
    (q, latent, rope, rows, kv_b, sinks, scale), _ = ARGUMENTS["attn.sparse_decode"]()
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    for name in ("attend_prefill", "attend_decode"):
        operator = getattr(torch.ops.day0_accel, name)
        torch.library.opcheck(operator, (q, latent, rope, rows, kv_b.tensor, sinks, scale), test_utils=tests)


def test_prefill_and_decode_attention_agree() -> None:
    """The prefill operator and the decode operator give the same rows for the same choice."""
    for module in (custom, fallback):
        args, _ = ARGUMENTS["attn.sparse_decode"]()
        torch.testing.assert_close(module.attend_decode(*args), module.attend_prefill(*args), atol=3e-6, rtol=3e-5)


def test_half_split_and_interleaved_rope_differ_by_a_permutation() -> None:
    """Both layouts rotate by the same angles, of other pairs."""
    x = rand(B, 5, 3, R)
    half = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    for module in (custom, fallback):
        one = module.rope(x, *table(), interleaved=True)
        other = module.rope(half, *table(), interleaved=False)
        torch.testing.assert_close(other, torch.cat((one[..., 0::2], one[..., 1::2]), dim=-1))


@pytest.mark.parametrize("module", [custom, fallback])
def test_ties_go_to_the_lower_id_and_too_few_keys_are_padded(module: Any) -> None:
    """Equal scores, zeros of both signs among them, choose the earlier key; choices come ascending, -1 last."""
    few = torch.tensor([[[1.0, 2.0, 2.0, 2.0], [0.0, float("-inf"), 1.0, float("-inf")]]])
    assert module.choose_keys(few, 3).tolist() == [[[1, 2, 3], [0, 2, -1]]]
    assert module.choose_keys(few, 2).tolist() == [[[1, 2], [0, 2]]]
    assert module.choose_keys(few[..., :1], 2).tolist() == [[[0, -1], [0, -1]]]
    assert module.choose_keys(scores()[:1, 1:2, :5], 2).tolist() == [[[0, 1]]]
    assert module.choose_experts(torch.tensor([[[1.0, 3.0, 3.0, 3.0]]]), 2).tolist() == [[[1, 2]]]


def test_an_unmapped_kind_of_attention_is_named() -> None:
    """map_attention raises NotImplementedError with the kind, and gives operators for those it has."""
    with pytest.raises(NotImplementedError, match="'sliding_window'"):
        BackendAdapter().map_attention("sliding_window")
    for kind in backend.ATTENTION:
        assert set(BackendAdapter().map_attention(kind)) <= set(ops.NAMES)


def test_an_operator_runs_on_the_highest_level_that_it_has() -> None:
    """From the wanted level on: custom, compiled, library, reference; what is switched runs on the reference."""
    assert set(BackendAdapter(prefer="reference").table.values()) == {"reference"}
    table = BackendAdapter(compiler="aot_eager").table
    assert (table["rope.turn"], table["act.gelu"], table["norm.layer"]) == ("custom", "compiled", "compiled")
    assert BackendAdapter().table["act.gelu"] == "library"
    assert BackendAdapter().fallbacks == ("mxfp4.decode",)
    assert BackendAdapter(fallback=["moe.experts"]).fallbacks == ("moe.experts", "mxfp4.decode")


def test_a_level_or_an_operator_that_is_not_there_is_named() -> None:
    """A compiler that is off, and operators of other names, are errors that say what to type."""
    with pytest.raises(SpecError, match="needs a compiler"):
        BackendAdapter(prefer="compiled")
    with pytest.raises(SpecError, match=r"did you mean 'attn\.sparse_decode'"):
        BackendAdapter(fallback=["attn.sparse_decod"])


def test_a_compiled_operator_says_what_it_was_compiled_from() -> None:
    """GELU through torch.compile (aot_eager) equals the reference."""
    use, x = BackendAdapter(prefer="compiled", compiler="aot_eager"), rand(4, D)
    assert use.table["act.gelu"] == "compiled"
    torch.testing.assert_close(ops.gelu(use, x, tanh=True), fallback.gelu(x, tanh=True))


@pytest.mark.parametrize("level", ["custom", "reference"])
def test_wrapping_an_operator_reaches_every_level(
    opened: Any, text: Case, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """A fault put at `accel_impl.ops.rope` is seen at the first rotated tap, whichever implementation runs."""
    port, rope = opened(ops=level), ops.rope
    before = whole(port, text).tensors()
    monkeypatch.setattr(ops, "rope", lambda use, x, cos, sin, **k: rope(use, x, sin, cos, **k))
    after = whole(port, text).tensors()
    changed = [name for name, value in before.items() if not torch.equal(after[name], value)]
    assert changed[0] == "layers.3.attn.q"
