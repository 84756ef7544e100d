"""Copies between views, joins and conversions between dtypes. Knows equality and rounding; must not know devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from harness.ops.arithmetic import Units
from harness.ops.case import Case, Given, Spec, Want
from harness.ops.inputs import FORMS, lay, one, sweep, values

SOURCE = "equality; conversions: IEEE 754, to nearest, ties to even"


def _blit(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    """A destination inside of other memory, and a source that lies otherwise."""
    kind = torch.int64 if content == "int64" else dtype
    shape = (0 if content == "empty" else 5, size or 7)
    source, _, target = content.partition(" to ") if " to " in content else (form, "", form)
    dst = lay(values(gen, kind, shape), target)
    new = values(gen, kind, shape, content if content == "nonfinite" else "")
    return Given(args=(dst, lay(new, source)))


def _blit_cases(full: bool) -> Iterator[Case]:
    yield from sweep(_blit, full=full, sizes=() if full else (1, 129, 1025), contents=("int64", "nonfinite", "empty"))
    for a in FORMS:
        for b in FORMS if full else ("sliced", "transposed"):
            if a != b:
                yield one(_blit, 65, "strided", f"{a} to {b}")


def _heads(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    """Four axes, heads and tokens exchanged in one of both, as caches and attention lay them."""
    shape = (2, 3, 0 if content == "empty" else size, 5)
    new = values(gen, torch.int64 if content == "int64" else dtype, shape)
    lain = new.transpose(1, 2).contiguous().transpose(1, 2)
    dst = values(gen, new.dtype, shape) * 0
    if content == "from tokens":
        return Given(args=(dst, lain))
    if content == "into tokens":
        return Given(args=(dst.transpose(1, 2).contiguous().transpose(1, 2), new))
    return Given(args=(lay(dst, "sliced"), lain.flip(0) if content == "reversed" else lain))


def _row(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    """A source of one row, repeated over all rows by a stride of 0."""
    dst = lay(values(gen, dtype, (5, size)), form)
    return Given(args=(dst, values(gen, dtype, (1, size)).expand(5, size)))


def _joined(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    kind = torch.int64 if content == "int64" else dtype
    sizes = (size, 0, 1, 3) if content != "empty" else (0, 0)
    parts = [values(gen, kind, (5, n)) for n in sizes]
    if content == "rows":
        return Given(args=(tuple(lay(part.mT.contiguous(), form) for part in parts), 0))
    return Given(args=(tuple(lay(part, form) for part in parts), -1))


def _whole(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    x = values(gen, dtype, (0 if content == "empty" else 3, size or 7), content)
    if content == "halves":  # just on, above and below the middle between two bfloat16 numbers, which ties decide
        steps = torch.arange(3 * size, dtype=torch.float64).view(3, size)
        x = (1 + (2 * steps + 1) * 2.0**-8 + (steps % 3 - 1) * 2.0**-20).to(dtype)
    return Given(args=(lay(x, form),))


def _cast(name: str, target: torch.dtype) -> Spec:
    def truth(u: Units, x: Tensor) -> Sequence[Want]:
        return [Want(value=x.to(target).to(torch.float64), exact=True)]

    return Spec(
        name=f"to_{name}", family="copies", call=lambda x: x.to(target), truth=truth, source=SOURCE, fresh=False,
        cases=lambda full: sweep(
            _whole, full=full, sizes=() if full else (1, 129, 1025), contents=("large", "halves", "nonfinite", "empty")
        ),
    )  # fmt: skip


def _cases(
    make: Callable[..., Given], contents: tuple[str, ...], forms: tuple[str, ...] = ()
) -> Callable[[bool], Iterator[Case]]:
    return lambda full: sweep(
        make, full=full, sizes=() if full else (1, 129, 1025), base=65, contents=contents, forms=forms
    )


def _same(u: Units, x: Tensor) -> Sequence[Want]:
    return [Want(value=x, exact=True)]


SPECS = (
    Spec(
        name="copy", family="copies", call=lambda dst, src: dst.copy_(src), cases=_blit_cases, writes=(0,),
        truth=lambda u, dst, src: [Want(value=src, exact=True)], source=SOURCE,
    ),
    Spec(
        name="copy_row", family="copies", call=lambda dst, src: dst.copy_(src), writes=(0,), source=SOURCE,
        cases=_cases(_row, ()), truth=lambda u, dst, src: [Want(value=src, exact=True)],
    ),
    Spec(
        name="copy_heads", family="copies", call=lambda dst, src: dst.copy_(src), writes=(0,), source=SOURCE,
        cases=lambda full: sweep(
            _heads, full=full, sizes=(1, 7, 33, 129) if full else (1, 33), base=9, forms=("contiguous",),
            contents=("from tokens", "into tokens", "reversed", "int64", "empty"),
        ),
        truth=lambda u, dst, src: [Want(value=src, exact=True)],
    ),
    Spec(
        name="contiguous", family="copies", call=lambda x: x.clone(memory_format=torch.contiguous_format),
        truth=_same, cases=_cases(_whole, ("nonfinite", "empty"), FORMS), source=SOURCE,
    ),
    Spec(
        name="cat", family="copies", call=lambda parts, dim: torch.cat(parts, dim=dim), source=SOURCE,
        truth=lambda u, parts, dim: [Want(value=_joined_by_hand(parts, dim), exact=True)],
        cases=_cases(_joined, ("rows", "int64", "empty")),
    ),
    _cast("float32", torch.float32),
    _cast("bfloat16", torch.bfloat16),
    _cast("float16", torch.float16),
)  # fmt: skip


def _joined_by_hand(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return parts one after the other along an axis."""
    return torch.from_numpy(np.concatenate([part.numpy() for part in parts], axis=dim))
