"""What reads and writes by index: gather, scatter, index_put, embedding, where. Must not know devices.

Everything is equality, except where values are added: in the dtype, in any order, n roundings of the sum of sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from harness.ops.arithmetic import Units
from harness.ops.case import Case, Given, Spec, Want
from harness.ops.inputs import lay, sweep, values

SOURCE = "equality; sums: Higham, Accuracy and Stability, 3.1, in the result's dtype"
ROWS = 11


def _table(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Tensor:
    kind = torch.int64 if content == "int64" else dtype
    return lay(values(gen, kind, (ROWS, size or 7), content if content == "nonfinite" else ""), form)


def _index(gen: torch.Generator, content: str, count: int = 7) -> Tensor:
    """Return row numbers: some twice, the first and the last among them."""
    if content == "empty":
        return torch.empty(0, dtype=torch.int64)
    found = torch.randint(0, ROWS, (count,), generator=gen)
    found[:3] = torch.tensor([ROWS - 1, 0, ROWS - 1])
    return -1 - found if content == "negative" else found


def _rows(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    return Given(args=(_table(gen, dtype, size, form, content), _index(gen, content)))


def _gathered(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    x = _table(gen, dtype, size, form, content)
    count = 0 if content == "empty" else 5
    at = torch.randint(0, ROWS, (count, x.shape[1]), generator=gen)
    return Given(args=(x, lay(at, "transposed" if form != "contiguous" else form)))


def _scattered(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    """Columns of a permutation: no place is written twice, so that there is one truth."""
    x = _table(gen, dtype, size, form, content)
    count = 0 if content == "empty" else 5
    at = torch.rand(ROWS, x.shape[1], generator=gen).argsort(0)[:count]
    return Given(args=(x, at, lay(values(gen, x.dtype, tuple(at.shape)), form)))


def _put(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    x = _table(gen, dtype, size, form, content)
    at = torch.randperm(ROWS, generator=gen)[: 0 if content == "empty" else 5]
    at = at - ROWS if content == "negative" else at
    return Given(args=(x, at, lay(values(gen, x.dtype, (len(at), x.shape[1])), form), False))


def _added(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    x, at = _rows(gen, dtype, size, form, content).args
    if content == "one place":
        at = torch.full_like(at, ROWS - 1)
    elif content == "no duplicates":
        at = torch.randperm(ROWS, generator=gen)[:7]
    return Given(args=(x, at, lay(values(gen, x.dtype, (len(at), x.shape[1])), form), True))


def index_put(x: Tensor, at: Tensor, new: Tensor, accumulate: bool) -> Tensor:
    """Write rows, or add them, in place."""
    return x.index_put_((at,), new, accumulate=accumulate)


def _pick(u: Units, x: Tensor, at: Tensor) -> Sequence[Want]:
    return [Want(value=torch.stack([x[int(i)] for i in at]) if len(at) else x[:0], exact=True)]


def _gather_truth(u: Units, x: Tensor, at: Tensor) -> Sequence[Want]:
    columns = torch.arange(x.shape[1]).expand_as(at)
    return [Want(value=x.flatten()[at * x.shape[1] + columns], exact=True)]


def _scatter_truth(u: Units, x: Tensor, at: Tensor, new: Tensor) -> Sequence[Want]:
    out = x.clone()
    for row in range(at.shape[0]):
        for column in range(at.shape[1]):
            out[int(at[row, column]), column] = new[row, column]
    return [Want(value=out, exact=True)]


def _put_truth(u: Units, x: Tensor, at: Tensor, new: Tensor, accumulate: bool) -> Sequence[Want]:
    out, size, count = x.clone(), x.abs(), torch.zeros(x.shape[0], 1, dtype=torch.float64)
    for row, place in enumerate(at.tolist()):
        out[place] = out[place] + new[row] if accumulate else new[row]
        size[place] += new[row].abs()
        count[place] += 1
    if not accumulate or not x.is_floating_point():
        return [Want(value=out, exact=True)]
    return [Want(value=out, slack=count * max(u.out, u.acc) * size)]


def _chosen_where(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    x = _table(gen, dtype, size, form, content)
    mask = torch.rand(x.shape, generator=gen) < 0.5
    return Given(args=(mask if form == "contiguous" else mask.t().contiguous().t(), x))


def _masked(mask: Tensor, x: Tensor) -> Tensor:
    return x.masked_fill(mask, -1.0 if x.is_floating_point() else -1)


def _masked_truth(u: Units, mask: Tensor, x: Tensor) -> Sequence[Want]:
    return [Want(value=torch.where(mask, torch.full_like(x, -1), x), exact=True)]


def _cases(make: Callable[..., Given], contents: tuple[str, ...]) -> Callable[[bool], Iterator[Case]]:
    return lambda full: sweep(make, full=full, sizes=() if full else (1, 129, 1025), base=65, contents=contents)


SPECS = (
    Spec(
        name="index_select", family="places", call=lambda x, at: x.index_select(0, at), truth=_pick, source=SOURCE,
        cases=_cases(_rows, ("int64", "nonfinite", "empty")),
        into=lambda out, x, at: torch.index_select(x, 0, at, out=out), strided_into=True,
    ),
    Spec(
        name="index", family="places", call=lambda x, at: x[at], truth=_pick, source=SOURCE,
        cases=_cases(_rows, ("int64", "negative", "empty")),
    ),
    Spec(
        name="embedding", family="places", call=lambda x, at: torch.nn.functional.embedding(at, x), truth=_pick,
        source=SOURCE, cases=_cases(_rows, ("nonfinite", "empty")),
    ),
    Spec(
        name="gather", family="places", call=lambda x, at: torch.gather(x, 0, at), truth=_gather_truth, source=SOURCE,
        cases=_cases(_gathered, ("int64", "nonfinite", "empty")),
    ),
    Spec(
        name="scatter", family="places", call=lambda x, at, new: x.scatter_(0, at, new), truth=_scatter_truth,
        source=SOURCE, writes=(0,), cases=lambda full: sweep(
            _scattered, full=full, sizes=(1, 33), base=17, contents=("int64", "empty")
        ),
    ),
    Spec(
        name="index_put", family="places", call=index_put, truth=_put_truth, writes=(0,), source=SOURCE,
        cases=_cases(_put, ("int64", "negative", "empty")),
    ),
    Spec(
        name="index_put_add", family="places", call=index_put, truth=_put_truth, writes=(0,), source=SOURCE,
        cases=_cases(_added, ("int64", "one place", "no duplicates", "negative", "empty")),
    ),
    Spec(
        name="masked_fill", family="places", call=_masked, truth=_masked_truth, source=SOURCE,
        cases=_cases(_chosen_where, ("int64", "nonfinite")),
    ),
)  # fmt: skip
