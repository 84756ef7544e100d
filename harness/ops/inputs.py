"""Inputs that bite: odd, prime and 2^k + 1 sizes, views, large and tiny values, ties, what is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from harness.ops.case import POISON, Case, Given

QUICK_WIDTHS = (
    1, 2, 3, 7, 17, 24, 33, 49, 64, 65, 97, 100, 129, 193, 257, 385, 513, 769, 1000, 1025, 1531, 2048, 2049, 3001, 4097,
)  # fmt: skip
"""One in each half of the bands between powers of two."""
FULL_WIDTHS = (
    1, 2, 3, 7, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 509, 512, 513, 1021, 1024, 1025, 1531,
    2047, 2048, 2049, 3001, 4096, 4097, 8192, 8193,
)  # fmt: skip
"""Ends of the blocks that kernels work in, one before, one after, and primes between."""
LONG_WIDTHS = (16385, 32768, 32771, 65537, 131101)
"""Rows as long as a vocabulary: beyond what one block holds, beyond 2^15 and 2^16. In the quick profile one of them."""
QUICK_FORMS = ("contiguous", "strided", "transposed")
FORMS = ("contiguous", "strided", "transposed", "offset", "sliced")
ODD_ROWS = 3

Maker = Callable[[torch.Generator, torch.dtype, int, str, str], Given]


def widths(full: bool) -> tuple[int, ...]:
    """Return the widths to try."""
    return FULL_WIDTHS if full else QUICK_WIDTHS


def long_widths(full: bool) -> tuple[int, ...]:
    """Return the widths to try of what is as long as a vocabulary or a context."""
    return (*FULL_WIDTHS, *LONG_WIDTHS) if full else (*QUICK_WIDTHS, 32771)


def sweep(
    make: Maker,
    *,
    full: bool,
    sizes: tuple[int, ...] = (),
    contents: tuple[str, ...] = ("large", "nonfinite", "empty"),
    forms: tuple[str, ...] = (),
    base: int = 129,
) -> Iterator[Case]:
    """Yield a case for each width, then for each form and each content at one width: one thing is odd at a time."""
    for size in sizes or widths(full):
        yield one(make, size, "contiguous", "normal")
    for form in forms or (FORMS if full else QUICK_FORMS):
        if form != "contiguous":
            yield one(make, base, form, "normal")
    for content in contents:
        yield one(make, 0 if content == "empty" else base, "contiguous", content)


def one(make: Maker, size: int, form: str, content: str) -> Case:
    """Return one case that can be made in other sizes."""

    def made(gen: torch.Generator, dtype: torch.dtype) -> Given:
        return make(gen, dtype, size, form, content)

    resized = partial(one, make, form=form, content=content)
    return Case(make=made, size=size, form=form, content=content, resized=lambda n: resized(n))


def values(gen: torch.Generator, dtype: torch.dtype, shape: tuple[int, ...], content: str = "normal") -> Tensor:
    """Return numbers of a dtype: normal, large, tiny, ties, far from 0, nan (one), nonfinite (and infinities)."""
    if not dtype.is_floating_point:
        wide = 2**40 if dtype is torch.int64 else 100
        return torch.randint(-3, 4, shape, generator=gen).to(dtype) if content == "ties" else torch.randint(
            -wide, wide, shape, generator=gen
        ).to(dtype)  # fmt: skip
    x = torch.randn(shape, generator=gen, dtype=torch.float64)
    if content == "large":
        x *= 300.0  # squares do not fit float16, exponentials do not fit float32
    elif content == "tiny":
        x *= 2.0**-20
    elif content == "ties":
        x = x.round().clamp(-2, 2)
    elif content == "far from 0":
        x += 64.0
    x = x.to(dtype)
    if content in ("nonfinite", "nan") and x.numel():
        flat = x.view(-1)
        for part, word in enumerate((math.nan, math.inf, -math.inf)[: 3 if content == "nonfinite" else 1]):
            flat[(part * flat.numel()) // 3 + flat.numel() // 7] = word
    return x


def lay(x: Tensor, form: str) -> Tensor:
    """Return the same values as a view of larger memory, poisoned around it. A tensor of one element stays as it is."""
    if form == "contiguous" or not x.numel() or not x.dim():
        return x
    poison = POISON if x.is_floating_point() else 99
    if form == "transposed" and x.dim() >= 2:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if form == "offset":
        memory = torch.full((x.numel() + 10,), poison, dtype=x.dtype)
        view = memory[3 : 3 + x.numel()].view(x.shape)
    elif form == "sliced" and x.dim() >= 2:  # rows of a larger matrix, as a slice of heads or of a fused product
        memory = torch.full((*x.shape[:-1], x.shape[-1] + 5), poison, dtype=x.dtype)
        view = memory[..., 2 : 2 + x.shape[-1]]
    else:
        memory = torch.full((*x.shape[:-1], 2 * x.shape[-1]), poison, dtype=x.dtype)
        view = memory[..., ::2]
    return view.copy_(x)
