from __future__ import annotations

import pytest
import torch
from torch import Tensor

from accel_impl import fallback, scan
from accel_impl.scan import CHUNK, TILE

B, H, K, V = 2, 3, 6, 5
DECAYS = {
    "usual": lambda x: -x.square(),
    "almost none": lambda x: -1e-4 * x.abs(),
    "none": lambda x: 0 * x,
    "almost all": lambda x: -30 - 20 * x.abs(),
    "both by channel": lambda x: torch.where(torch.arange(K) % 2 == 0, -1e-3 * x.abs(), -80 * x.abs()),
    "both by token": lambda x: torch.where(torch.arange(x.shape[1])[:, None, None] % 3 == 0, -900.0, -1e-3 * x.abs()),
}


def given(tokens: int, decay: str = "usual", dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Return q, k, v, decay, beta [B, T, H, ...] and a state that is not empty."""
    draw = torch.Generator().manual_seed(tokens)
    parts = [torch.randn(B, tokens, H, width, generator=draw, dtype=torch.float64) for width in (K, K, V, K)]
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in parts[:2])
    beta = torch.rand(B, tokens, H, generator=draw, dtype=torch.float64)
    state = torch.randn(B, H, K, V, generator=draw, dtype=torch.float64)
    return tuple(x.to(dtype) for x in (q, k, parts[2], DECAYS[decay](parts[3]), beta, state))


def by_steps(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return what each token reads, and the state afterwards, by the formula of the page."""
    found = []
    for t in range(q.shape[1]):
        state = state * decay[:, t].exp()[..., None]
        wrong = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], wrong)
        found.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(found, dim=1), state


@pytest.mark.parametrize("decay", DECAYS)
def test_chunks_say_what_steps_say(decay: str) -> None:
    """For all lengths around a chunk, and beyond a tile, chunks in float32 give what steps in float64 do."""
    for tokens in (*range(1, 2 * CHUNK + 9), TILE - 1, TILE, TILE + 1, TILE + CHUNK + 3):
        exact, last = by_steps(*given(tokens, decay, torch.float64))
        *parts, state = given(tokens, decay)
        core = scan.chunked(*parts, state)
        assert (core - exact).abs().max() < 3e-6, tokens
        assert (state - last).abs().max() < 3e-6, tokens


def test_a_sum_that_cancels_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decays between two tokens as a difference of sums from the start lose their digits after a huge one."""
    real = torch.Tensor.cumsum

    def difference(x: Tensor, dim: int) -> Tensor:
        if x.dim() < 6:
            return real(x, dim)
        total = real(x[..., 0, :], -2)  # the first column holds every decay after token 0
        return (total[..., :, None, :] - total[..., None, :, :]).clamp(max=0)

    *parts, state = given(40, "both by token")
    monkeypatch.setattr(torch.Tensor, "cumsum", difference)
    core = scan.chunked(*parts, state)
    monkeypatch.undo()
    exact, _ = by_steps(*given(40, "both by token", torch.float64))
    assert (core - exact).abs().max() > 3e-5


def test_chunks_go_on_from_chunks() -> None:
    """A sequence cut anywhere, each part from the state of the one before, gives what it gives whole."""
    *parts, state = given(45)
    whole = scan.chunked(*parts, state)
    for cut in (1, 15, 16, 17, 31, 44):
        *_, again = given(45)
        first = scan.chunked(*(x[:, :cut] for x in parts), again)
        rest = scan.chunked(*(x[:, cut:] for x in parts), again)
        torch.testing.assert_close(torch.cat((first, rest), dim=1), whole, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(again, state, atol=2e-6, rtol=1e-5)


def test_a_step_is_a_chunk_of_one() -> None:
    """One token through the step of decoding changes the state as a chunk of one does."""
    *parts, state = given(1)
    *_, other = given(1)
    core = scan.step(*(x[:, 0] for x in parts), state)
    torch.testing.assert_close(scan.chunked(*parts, other)[:, 0], core)
    torch.testing.assert_close(other, state)


def test_slots_that_are_not_addressed_stay_as_they_are() -> None:
    """Among the states of many slots, only those of the step change, each by its own tokens."""
    *parts, state = given(7)
    slots = torch.full((5, H, K, V), 3.0)
    slots[torch.tensor([4, 1])] = state
    core = fallback.scan_chunks(*parts, slots, torch.tensor([4, 1]))
    exact, last = by_steps(*given(7, "usual", torch.float64))
    torch.testing.assert_close(core.double(), exact, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(slots[torch.tensor([4, 1])].double(), last, atol=2e-6, rtol=1e-5)
    assert bool((slots[torch.tensor([0, 2, 3])] == 3.0).all())
