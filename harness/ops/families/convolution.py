"""Convolutions: 2-D with stride and padding, causal 1-D by channel. Knows formulas; must not know devices.

The truth gathers every window and multiplies it out, so the budget is that of a product (see `matrix`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from harness.ops.arithmetic import Units
from harness.ops.case import Given, Spec, Want
from harness.ops.families.matrix import SOURCE, product
from harness.ops.inputs import lay, sweep, values


def _pictures(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    batch = 0 if content == "empty" else 2
    if content == "patches of 14":  # as a tower for pictures cuts them
        x, w = values(gen, dtype, (2, 3, 42, 28)), values(gen, dtype, (9, 3, 14, 14))
        return Given(args=(lay(x, form), w, values(gen, dtype, (9,)), (14, 14), (0, 0)))
    x = lay(values(gen, dtype, (batch, 3, size or 7, 9)), form)
    w, b = values(gen, dtype, (5, 3, 3, 2)), values(gen, dtype, (5,))
    stride, padding = ((2, 3), (1, 0)) if content != "patches" else ((3, 2), (0, 0))
    return Given(args=(x, w, b, stride, padding))


def _conv2d(u: Units, x: Tensor, w: Tensor, b: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Sequence[Want]:
    down, across = padding
    padded = torch.zeros(x.shape[0], x.shape[1], x.shape[2] + 2 * down, x.shape[3] + 2 * across, dtype=x.dtype)
    padded[:, :, down : down + x.shape[2], across : across + x.shape[3]] = x
    out, channels, high, wide = w.shape
    windows = padded.unfold(2, high, stride[0]).unfold(3, wide, stride[1])  # [B, C, rows, columns, high, wide]
    rows = windows.permute(0, 2, 3, 1, 4, 5).reshape(*_outer(windows), channels * high * wide)
    want = product(u, rows, w.reshape(out, -1).mT, more=1)
    assert want.slack is not None
    assert want.spread is not None
    value = (want.value + b).permute(0, 3, 1, 2)
    rounded = u.acc * b.abs() + u.out * want.value.abs()
    return [
        Want(
            value=value, slack=(want.slack + rounded).permute(0, 3, 1, 2),
            spread=(want.spread + rounded).permute(0, 3, 1, 2),
        )
    ]  # fmt: skip


def _outer(windows: Tensor) -> tuple[int, int, int]:
    return windows.shape[0], windows.shape[2], windows.shape[3]


def causal_conv1d(x: Tensor, w: Tensor) -> Tensor:
    """Return for each channel the weighted sum of the last values. x [B, C, T], w [C, K]."""
    return F.conv1d(F.pad(x, (w.shape[1] - 1, 0)), w[:, None], groups=w.shape[0])


def _signals(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    x = lay(values(gen, dtype, (0 if content == "empty" else 2, 5, size or 7)), form)
    return Given(args=(x, values(gen, dtype, (5, 4))))


def _causal(u: Units, x: Tensor, w: Tensor) -> Sequence[Want]:
    value, size = torch.zeros_like(x), torch.zeros_like(x)
    taps = w.shape[1]
    for tap in range(taps):
        back = taps - 1 - tap
        part = w[:, tap, None] * x[..., : max(0, x.shape[-1] - back)]
        value[..., back:] += part
        size[..., back:] += part.abs()
    factors = 2 * u.factor * size
    return [Want(value=value, slack=(taps + 1) * u.acc * size + factors, spread=taps * u.acc * size + factors)]


SPECS = (
    Spec(
        name="conv2d", family="convolution", call=F.conv2d, truth=_conv2d, source=SOURCE,
        cases=lambda full: sweep(
            _pictures, full=full, sizes=(7, 14, 33) if full else (14,), base=13,
            contents=("patches", "patches of 14", "empty"),
        ),
    ),
    Spec(
        name="causal_conv1d", family="convolution", call=causal_conv1d, truth=_causal, plain=False, source=SOURCE,
        cases=lambda full: sweep(
            _signals, full=full, sizes=(1, 3, 64, 129, 257) if full else (1, 65), contents=("empty",), base=33,
        ),
    ),
)  # fmt: skip
