from __future__ import annotations

from typing import Any

import pytest
import torch
from accel_runs import whole

from accel_impl import backend, custom, fallback, ops
from accel_impl.backend import BackendAdapter
from accel_impl.formats import Plain
from harness.errors import SpecError
from harness.types import Case

B, T, S, H, D, R, L, V, K = 1, 5, 9, 3, 20, 8, 10, 7, 4


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def positions() -> torch.Tensor:
    return torch.arange(S - T, S)[None]


def chosen() -> torch.Tensor:
    return torch.tensor([[[0, 1, 3, -1], [0, 2, 5, -1], [1, 4, 5, 6], [0, 5, 6, 7], [2, 3, 7, 8]]])


def dense_args() -> tuple[Any, ...]:
    kv_b = Plain(tensor=rand(H * (D - R + V), L))
    return (rand(B, T, H, D), rand(B, S, L), rand(B, S, R), kv_b, rand(H), chosen(), D**-0.5)


def sparse_args() -> tuple[Any, ...]:
    q, latent, rope, kv_b, sinks, ids, scale = dense_args()
    picked = ids.clamp(min=0)
    return (q, latent[0][picked], rope[0][picked], kv_b, sinks, ids >= 0, scale)


def experts() -> dict[int, tuple[Plain, Plain, Plain]]:
    def matrix(out: int, into: int, seed: int) -> Plain:
        return Plain(tensor=rand(out, into, seed=seed) * into**-0.5)

    return {e: (matrix(12, D, e), matrix(12, D, e + 50), matrix(D, 12, e + 90)) for e in (0, 2, 3)}


ARGUMENTS: dict[str, Any] = {
    "rms_norm": lambda: ((rand(4, D), rand(D, seed=1), 1e-5), {}),
    "rope": lambda: ((rand(B, T, H, R), positions()), {"theta": 100.0, "interleaved": True}),
    "linear": lambda: ((rand(4, D), Plain(tensor=rand(6, D)), rand(6)), {}),
    "swiglu": lambda: ((3 * rand(4, D), 3 * rand(4, D, seed=1)), {}),
    "swiglu_clamped": lambda: ((6 * rand(4, D), 6 * rand(4, D, seed=1)), {}),
    "indexer_scores": lambda: ((rand(B, T, H, D), rand(B, S, D), rand(B, T, H), positions()), {}),
    "attend_dense": lambda: (dense_args(), {}),
    "attend_sparse": lambda: (sparse_args(), {}),
    "grouped_experts": lambda: (
        (
            rand(B, T, D),
            torch.tensor([[[0, 1], [2, 3], [0, 3], [1, 2], [1, 4]]]),
            rand(B, T, 2),
            experts(),
            fallback.swiglu,
        ),
        {},
    ),
    "attend_patches": lambda: ((rand(S, H, D), rand(S, H, D, seed=1), rand(S, H, D, seed=2), (4, 5)), {}),
}


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_custom_says_what_the_fallback_says(name: str) -> None:
    """In float32 every custom operator equals its fallback up to the order of sums."""
    args, kwargs = ARGUMENTS[name]()
    actual, expected = getattr(custom, name)(*args, **kwargs), getattr(fallback, name)(*args, **kwargs)
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=2e-5)


def test_every_custom_operator_is_held_against_its_fallback() -> None:
    """No custom operator escapes the comparison above, and every operator has a fallback."""
    assert {n for n in ops.NAMES if hasattr(custom, n)} == set(ARGUMENTS)
    assert all(hasattr(fallback, name) for name in ops.NAMES)


def test_dense_and_sparse_attention_agree() -> None:
    """The prefill operator and the decode operator give the same rows for the same choice."""
    for module in (custom, fallback):
        dense, sparse = module.attend_dense(*dense_args()), module.attend_sparse(*sparse_args())
        torch.testing.assert_close(sparse, dense, atol=2e-6, rtol=2e-5)


def test_half_split_and_interleaved_rope_differ_by_a_permutation() -> None:
    """Both layouts rotate by the same angles, of other pairs."""
    x = rand(B, T, H, R)
    half = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    one = custom.rope(x, positions(), theta=100.0, interleaved=True)
    other = custom.rope(half, positions(), theta=100.0, interleaved=False)
    torch.testing.assert_close(other, torch.cat((one[..., 0::2], one[..., 1::2]), dim=-1))


def test_ties_go_to_the_lower_id_and_too_few_keys_are_padded() -> None:
    """Equal scores choose the earlier key; choices come ascending, -1 last."""
    scores = torch.tensor([[[1.0, 2.0, 2.0, 2.0], [0.0, float("-inf"), 1.0, float("-inf")]]])
    assert fallback.choose_keys(scores, 3).tolist() == [[[1, 2, 3], [0, 2, -1]]]
    assert fallback.choose_keys(scores, 2).tolist() == [[[1, 2], [0, 2]]]
    assert fallback.choose_keys(scores[..., :1], 2).tolist() == [[[0, -1], [0, -1]]]
    assert fallback.choose_experts(torch.tensor([[[1.0, 3.0, 3.0, 3.0]]]), 2).tolist() == [[[1, 2]]]


def test_an_unmapped_kind_of_attention_is_named() -> None:
    """map_attention raises NotImplementedError with the kind, and gives operators for those it has."""
    with pytest.raises(NotImplementedError, match="'sliding_window'"):
        BackendAdapter().map_attention("sliding_window")
    for kind in backend.ATTENTION:
        assert set(BackendAdapter().map_attention(kind)) <= set(ops.NAMES)


def test_the_table_prefers_custom_then_compiled_then_the_fallback() -> None:
    """Each operator runs on the best implementation that is wanted and there."""
    assert set(BackendAdapter(prefer="fallback").table.values()) == {"fallback"}
    table = BackendAdapter(compiler="aot_eager").table
    assert (table["rope"], table["gelu"], table["choose_keys"]) == ("custom", "compiled", "fallback")
    assert BackendAdapter().fallbacks == ("layer_norm", "gelu", "choose_keys", "choose_experts")
    with pytest.raises(SpecError, match="needs a compiler"):
        BackendAdapter(prefer="compiled")


def test_a_compiled_operator_says_what_it_was_compiled_from() -> None:
    """GELU through torch.compile (aot_eager) equals the fallback."""
    use, x = BackendAdapter(prefer="compiled", compiler="aot_eager"), rand(4, D)
    assert use.table["gelu"] == "compiled"
    torch.testing.assert_close(ops.gelu(use, x, tanh=True), fallback.gelu(x, tanh=True))


@pytest.mark.parametrize("variant", ["custom", "fallback"])
def test_wrapping_an_operator_reaches_every_variant(
    opened: Any, text: Case, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """A fault put at `accel_impl.ops.rope` is seen at the first rotated tap, whichever implementation runs."""
    port, rope = opened(ops=variant), ops.rope
    before = whole(port, text).tensors()
    monkeypatch.setattr(ops, "rope", lambda use, x, p, **k: rope(use, x, p + 1, **k))
    after = whole(port, text).tensors()
    changed = [name for name, value in before.items() if not torch.equal(after[name], value)]
    assert changed[0] == "layers.0.attn.q"
