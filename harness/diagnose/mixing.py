"""How an attention weighed its keys: read back from what it mixed. Knows tensors; no taps, traces or limits.

What an attention gives a token is a mean of its values. While there are fewer keys than features in a head, the weights
can be solved for, so those of both sides can be held against each other: what a query saw, and how it weighed it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.diagnose.matrix import Made, Matrix, odd_channels

FIRST = 0.02
"""Relative difference below which the first token of a head is its only value: so values are recognised."""
FEW = 24
"""Most tokens that are read back; a solution of more unknowns gathers roundings."""
SEEN, UNSEEN = 0.03, 0.01
"""A weight above the first is one; one below the second is none."""
QUERIES = 3
"""Queries that must see a key before it is said that queries do: sharp attention hides it from most."""


def mixed(matrix: Matrix) -> Made:
    """Other weights of the same values: keys of the future, keys never seen, another scale of the softmax."""
    width = matrix.actual.shape[1]
    for heads in [matrix.heads] if matrix.heads else [h for h in range(1, width // 8 + 1) if width % h == 0]:
        found = list(_mixed(matrix, heads))
        yield from found
        if found:
            return


def _mixed(matrix: Matrix, heads: int) -> Made:
    """Read weights back for a number of heads: another number than there are fits nothing."""
    size = matrix.actual.shape[1] // heads
    rows = min(len(matrix.actual) - 1, size * 3 // 4, FEW)
    found = _mixture(matrix, heads) if rows >= 3 else None
    if found is None:
        return
    due, held = (_weights(x, found, rows) for x in (matrix.expected, matrix.actual))
    if due is None or held is None or float(due.diagonal(1, 1, 2).abs().max()) > SEEN:
        return
    tried = torch.arange(len(matrix.actual)) < rows
    for words, weights in _readings(due, held):
        yield words, _remixed(matrix, found, weights), tried
    half = size // 2 - 1
    otherwise = _weights(matrix.actual, found, half, every=2) if half >= 3 else None
    if otherwise is not None:
        tried = (torch.arange(len(matrix.actual)) < half)[:, None] & odd_channels(matrix)
        words = "the right values with other weights: queries, keys, their rotary angles, scale or mask"
        yield words, _remixed(matrix, found, otherwise), tried


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mixture:
    """Values [H, T, D] that a core is a mean of, and the gate [H, T, D] that each query's mean went through."""

    values: Tensor
    gate: Tensor


def _remixed(matrix: Matrix, found: _Mixture, weights: Tensor) -> Tensor:
    """Return the expected values with other weights [H, rows, rows + 1] for the first queries."""
    rows = weights.shape[1]
    changed = matrix.expected.clone()
    mean = weights @ found.values[:, : rows + 1]
    changed[:rows] = (mean * found.gate[:, :rows]).transpose(0, 1).flatten(1)
    return changed


def _mixture(matrix: Matrix, heads: int) -> _Mixture | None:
    """Return the values among what lies around, plain or behind a gate that lies there too, or None."""
    tokens, width = matrix.actual.shape
    plain = torch.ones(heads, tokens, width // heads, dtype=matrix.expected.dtype)
    for gate in (plain, *_gates(matrix, heads)):
        for x in matrix.around.values():
            values = _values(matrix, x, heads, gate[:, 0])
            if values is not None:
                return _Mixture(values=values, gate=gate)
    return None


def _gates(matrix: Matrix, heads: int) -> Iterator[Tensor]:
    """Return what may gate the heads, [H, T, D]: a projection of its own, or a half of one, by head or in all."""
    tokens, width = matrix.actual.shape
    for x in matrix.around.values():
        if x.shape[1] == width:
            yield torch.sigmoid(x.reshape(tokens, heads, -1)).transpose(0, 1)
        elif x.shape[1] == heads:
            yield torch.sigmoid(x.reshape(tokens, heads, 1)).transpose(0, 1).expand(-1, -1, width // heads)
        elif x.shape[1] == 2 * width:
            for halves in (x.reshape(tokens, heads, 2, -1), x.reshape(tokens, 2, heads, -1).transpose(1, 2)):
                yield from (torch.sigmoid(halves[:, :, i]).transpose(0, 1) for i in (1, 0))


def _values(matrix: Matrix, x: Tensor, heads: int, gate: Tensor) -> Tensor | None:
    """Return a tensor as values [H, T, D] if the first token of every head is its first value, and None otherwise.

    Values lie in heads of their own, fewer than those of queries or as many: alone, at the end of a fused row, or at
    the end of each head. `gate` [H, D] is what the first token's went through.
    """
    first = matrix.expected[0].reshape(heads, -1)
    size = first.shape[1]
    for count in [h for h in range(1, heads + 1) if heads % h == 0]:
        ways = [x[:, -count * size :].reshape(len(x), count, size)] if x.shape[1] >= count * size else []
        if x.shape[1] % count == 0 and x.shape[1] // count > size:
            ways.append(x.reshape(len(x), count, -1)[..., -size:])
        for values in ways:
            spread = values.repeat_interleave(heads // count, 1)
            alike = torch.nn.functional.cosine_similarity(spread[0] * gate, first, dim=-1)
            if bool((alike > 1 - FIRST**2).all()):
                return spread.transpose(0, 1)
    return None


def _weights(core: Tensor, found: _Mixture, rows: int, every: int = 1) -> Tensor | None:
    """Return the weights [H, rows, rows + 1] that make a core of values, one key of the future included, or None.

    They are fitted on every so many-th feature.
    """
    heads, _, size = found.values.shape
    weights = torch.zeros(heads, rows, rows + 1, dtype=core.dtype)
    for row in range(rows):
        through = found.values[:, : row + 2] * found.gate[:, row : row + 1]
        keys = through[..., ::every].transpose(1, 2)  # [H, D, keys]
        target = core[row].reshape(heads, size, 1)[:, ::every]
        solved = torch.linalg.lstsq(keys, target).solution
        if float((keys @ solved - target).norm()) > 0.1 * float(target.norm()):
            return None
        weights[:, row, : row + 2] = solved[..., 0]
    return weights


def _readings(due: Tensor, held: Tensor) -> list[tuple[str, Tensor]]:
    """Return what the weights [H, T, S] that are held may mean beside those that are due."""
    tokens, keys = due.shape[1:]
    ahead = torch.arange(keys)[None] - torch.arange(tokens)[:, None]
    found: list[tuple[str, Tensor]] = []
    future, past = ahead == 1, ahead <= 0
    if int((held[:, future] > SEEN).any(0).sum()) >= QUERIES:
        extra = torch.where(future, held, torch.zeros(()))
        kept = due * (1 - extra.sum(-1, keepdim=True)) + extra
        found.append(("the values of one key of the future too: the causal mask", kept))
    blind = (due > SEEN) & (held.abs() < UNSEEN)
    for words, hidden in _hidden(ahead, blind):
        kept = torch.where(hidden & past, torch.zeros(()), due)
        found.append((words, _summing_to(kept, held)))
    seen = (due.abs() < UNSEEN) & (held > SEEN) & past
    if bool(seen.any()) and not bool(((due > SEEN) & seen.any(1, keepdim=True) & (held < UNSEEN)).any()):
        nearest = int(-ahead.expand_as(seen)[seen].max())
        extra = torch.where((ahead <= -nearest) & (due.abs() < UNSEEN), held, torch.zeros(()))
        kept = due * (1 - extra.sum(-1, keepdim=True)) + extra
        found.append((f"the values of keys {nearest} back and further too: a window that is wider or ignored", kept))
    found += _sharper(due, held, past)
    return found


def _summing_to(weights: Tensor, held: Tensor) -> Tensor:
    """Return weights that sum to what those that are held do: a sink may take the rest."""
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-9) * held.sum(-1, keepdim=True)


def _hidden(ahead: Tensor, blind: Tensor) -> list[tuple[str, Tensor]]:
    """Return rules that would hide keys from queries, where weights have vanished as they say."""
    tokens, keys = ahead.shape
    found: list[tuple[str, Tensor]] = []
    first = (torch.arange(keys) == 0).expand(tokens, keys) & (ahead < 0)
    if bool(blind[:, first].any()):
        found.append(("the values of all keys but the first: the mask, or the start of a page", first))
    if bool(blind[:, ahead == 0].any()):
        found.append(("the values of all keys but each query's own: the mask's diagonal", ahead == 0))
    far = [-int(a) for a in ahead.expand_as(blind)[blind & (ahead < 0)]]
    if far:
        found.append((f"the values of each query's last {min(far)} keys only: a window", ahead <= -min(far)))
    return found


def _sharper(due: Tensor, held: Tensor, past: Tensor) -> list[tuple[str, Tensor]]:
    """Return the scale of a softmax that would turn the weights that are due into those that are held."""
    both = past & (due > UNSEEN) & (held > UNSEEN)
    count = both.sum(-1, keepdim=True)
    usable = both & (count >= 2)
    if int(usable.sum()) < 8:
        return []
    a, e = (torch.where(usable, x.clamp(min=1e-12).log(), torch.zeros(())) for x in (held, due))
    a, e = (torch.where(usable, x - x.sum(-1, keepdim=True) / count.clamp(min=1), torch.zeros(())) for x in (a, e))
    scale = float((a * e).sum() / e.square().sum().clamp(min=1e-300))
    if scale <= 0 or abs(scale - 1) < 1e-3:
        return []
    kept = torch.where(past, due.clamp(min=0) ** scale, torch.zeros(()))
    kept = _summing_to(kept, held)
    return [(f"the right values, weighed by a softmax of scores {scale:.4g} times as large: the softmax scale", kept)]
