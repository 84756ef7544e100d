"""Products of matrices: plain, batched, linear, by experts. Knows formulas and budgets; must not know devices.

Budget of a sum of K products in any order: K u (sum of |a||b|) at worst, sqrt(K) u where roundings are independent.
Source: Higham, Accuracy and Stability, section 3.1; Higham and Mary 2019 for the square root.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from harness.ops.arithmetic import Units
from harness.ops.case import Case, Given, Spec, Want
from harness.ops.inputs import lay, one, sweep, values

SOURCE = "Higham, Accuracy and Stability of Numerical Algorithms, 3.1 (any order of sums); Higham and Mary 2019"
MANY_ROWS = 65539
"""Beyond 2^16 - 1, the most blocks that the second axis of a launch grid has."""


def times(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b by numpy: torch's own product may be what is tested."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.matmul(a.numpy(), b.numpy()))


def product(u: Units, a: Tensor, b: Tensor, *, more: int = 0) -> Want:
    """Return what a @ b must be; `more` further terms are added to each sum."""
    count = a.shape[-1] + more
    size = times(a.abs(), b.abs())
    factors = 2 * u.factor * size
    return Want(
        value=times(a, b), slack=(count + 1) * u.acc * size + factors,
        spread=count**0.5 * u.acc * size + factors,
    )  # fmt: skip


def _pair(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    rows = MANY_ROWS if content == "many rows" else 5
    a = values(gen, dtype, (rows, size), content)
    b = values(gen, dtype, (size, 7), content if content == "large" else "normal")
    if content == "large" and dtype is torch.float16:
        b = b / 300.0
    return Given(args=(lay(a, form), lay(b, "transposed" if form == "strided" else form)))


def _square(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    """Rows or columns as many as `size`, so that tiles of the output have edges: contents `rows`, `columns`."""
    rows, columns = (size, 9) if content == "rows" else (3, size)
    return Given(args=(values(gen, dtype, (rows, 24)), lay(values(gen, dtype, (24, columns)), form)))


def _matmul_cases(full: bool) -> Iterator[Case]:
    sizes = () if full else (1, 7, 17, 33, 64, 72, 129, 257, 385, 513, 1025, 2049)
    yield from sweep(_pair, full=full, sizes=sizes)
    yield one(_pair, 2, "contiguous", "many rows")
    for size in (1, 2, 8, 16, 17, 33, 64, 65, 127, 128, 129, 257, 513, 1025) if full else (1, 64, 129, 513):
        yield one(_square, size, "contiguous", "rows")
        yield one(_square, size, "transposed", "columns")


def _batched(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    count = {"no batch": 0, "many": 517}.get(content, 3)
    a, b = (lay(values(gen, dtype, shape), form) for shape in ((count, 5, size), (count, size, 7)))
    return Given(args=(a, b[:1].expand(count, size, 7) if content == "one for all" else b))


def _linear(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    x, w, b = (values(gen, dtype, shape, "normal") for shape in ((2, 3, size), (11, size), (11,)))
    return Given(args=(lay(x, form), lay(w, "sliced" if form == "strided" else "contiguous"), b))


def _linear_truth(u: Units, x: Tensor, w: Tensor, b: Tensor) -> Sequence[Want]:
    found = product(u, x, w.mT, more=1)
    assert found.slack is not None
    assert found.spread is not None
    size = b.abs() + times(x.abs(), w.abs().mT)
    rounded = u.out * found.value.abs()  # the bias may be added to a product that was rounded already
    return [Want(value=found.value + b, slack=found.slack + u.acc * size + rounded, spread=found.spread + rounded)]


def _experts(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    """Rows sorted by expert; the counts have an expert without rows, one with one, and the last with most."""
    counts = [0, 0, 0, 0] if content == "empty" else [3, 0, 1, 8]
    x, w = values(gen, dtype, (sum(counts), size or 8)), values(gen, dtype, (4, 6, size or 8))
    ends = torch.tensor(counts).cumsum(0)
    return Given(args=(lay(x, form), lay(w, "transposed" if form == "transposed" else "contiguous"), ends))


def expert_product(x_TI: Tensor, w_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Return each row times the matrix of its expert. Rows up to `ends_E[e]` belong to expert e or one before."""
    out, start = x_TI.new_empty(x_TI.shape[0], w_EOI.shape[1]), 0
    for expert, end in enumerate(ends_E.tolist()):
        out[start:end] = x_TI[start:end] @ w_EOI[expert].mT
        start = end
    return out


def _groups(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    """As `_experts`, for torch's own operator: widths of whole 16 bytes, ends in int32, weights [E, I, O]."""
    wide = max(8, -(-size // 8) * 8)
    counts = [0, 0, 0, 0] if content == "empty" else [3, 0, 1, 8]
    w = values(gen, dtype, (4, 24, wide)).mT if form == "transposed" else values(gen, dtype, (4, wide, 24))
    return Given(args=(values(gen, dtype, (sum(counts), wide)), w, torch.tensor(counts).cumsum(0).to(torch.int32)))


def grouped_mm(x_TI: Tensor, w_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Return each row times the matrix of its group, by the operator that torch has for it."""
    return torch.nn.functional.grouped_mm(x_TI, w_EIO, offs=ends_E)


def _experts_truth(u: Units, x: Tensor, w: Tensor, ends: Tensor) -> Sequence[Want]:
    owner = torch.searchsorted(ends, torch.arange(x.shape[0]), right=True)
    found = product(u, x[:, None, :], w[owner].mT)
    assert found.slack is not None
    assert found.spread is not None
    return [Want(value=found.value[:, 0], slack=found.slack[:, 0], spread=found.spread[:, 0])]


SPECS = (
    Spec(
        name="matmul", family="matrix", call=torch.matmul, truth=lambda u, a, b: [product(u, a, b)],
        cases=_matmul_cases, into=lambda out, a, b: torch.mm(a, b, out=out), strided_into=True, source=SOURCE,
    ),
    Spec(
        name="bmm", family="matrix", call=torch.bmm, truth=lambda u, a, b: [product(u, a, b)],
        cases=lambda full: sweep(
            _batched, full=full, sizes=() if full else (7, 129, 1025),
            contents=("one for all", "many", "empty", "no batch"),
        ),
        into=lambda out, a, b: torch.bmm(a, b, out=out), strided_into=True, source=SOURCE,
    ),
    Spec(
        name="linear", family="matrix", call=torch.nn.functional.linear, truth=_linear_truth,
        cases=lambda full: sweep(_linear, full=full, sizes=() if full else (7, 65, 1025), contents=("empty",)),
        source=SOURCE,
    ),
    Spec(
        name="expert_product", family="matrix", call=expert_product, truth=_experts_truth,
        cases=lambda full: sweep(
            _experts, full=full, sizes=() if full else (7, 65), contents=("empty",), forms=("strided", "transposed")
        ),
        source=SOURCE, plain=False,
    ),
    *(
        Spec(
            name="grouped_mm", family="matrix", call=grouped_mm, source=SOURCE,
            truth=lambda u, x, w, ends: _experts_truth(u, x, w.mT, ends.long()),
            cases=lambda full: sweep(
                _groups, full=full, sizes=(8, 16, 64, 136, 1032) if full else (8, 136), contents=("empty",),
                forms=("transposed",),
            ),
        )
        for _ in range(hasattr(torch.nn.functional, "grouped_mm"))
    ),
)  # fmt: skip
