"""What reads and writes by index: gather, scatter, index_put, embedding, where. Must not know devices.

Everything is equality, except where values are added: in the dtype, in any order, n roundings of the sum of sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from harness.ops.arithmetic import Units
from harness.ops.case import Case, Given, Spec, Want
from harness.ops.inputs import lay, sweep, values

SOURCE = "equality; sums: Higham, Accuracy and Stability, 3.1, in the result's dtype"
ROWS = 11
MANY_ROWS = 65551
"""Rows of contents `tall`, and places of contents `many`: beyond 2^16."""


def _rows_of(content: str) -> int:
    return MANY_ROWS if content == "tall" else ROWS


def _table(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Tensor:
    kind, width = torch.int64 if content == "int64" else dtype, 3 if content in ("tall", "many") else size or 7
    return lay(values(gen, kind, (_rows_of(content), width), content if content == "nonfinite" else ""), form)


def _index(gen: torch.Generator, content: str, count: int = 7) -> Tensor:
    """Return row numbers: some twice, the first and the last among them."""
    if content == "empty":
        return torch.empty(0, dtype=torch.int64)
    rows = _rows_of(content)
    found = torch.randint(0, rows, (MANY_ROWS if content == "many" else count,), generator=gen)
    found[:3] = torch.tensor([rows - 1, 0, rows - 1])
    return -1 - found if content == "negative" else found


def _rows(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    return Given(args=(_table(gen, dtype, size, form, content), _index(gen, content)))


def _gathered(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    x = _table(gen, dtype, size, form, content)
    dim, count = 1 if content in ("columns", "many") else 0, 0 if content == "empty" else 5
    shape = (x.shape[0], count) if dim else (count, x.shape[1])
    shape = (x.shape[0], MANY_ROWS) if content == "many" else shape
    at = torch.randint(0, x.shape[dim], shape, generator=gen)
    return Given(args=(x, dim, lay(at, "transposed" if form != "contiguous" else form)))


def _scattered(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    """Columns of a permutation: no place is written twice, so that there is one truth."""
    x = _table(gen, dtype, size, form, content)
    dim, count = 1 if content == "columns" else 0, 0 if content == "empty" else 5
    at = torch.rand(tuple(x.shape), generator=gen).argsort(dim).narrow(dim, 0, min(count, x.shape[dim]))
    return Given(args=(x, dim, at, lay(values(gen, x.dtype, tuple(at.shape)), form)))


def _put(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    x = _table(gen, dtype, size, form, content)
    rows = _rows_of(content)
    at = torch.randperm(rows, generator=gen)[: 0 if content == "empty" else 5]
    at = at - ROWS if content == "negative" else at
    if content == "tall":
        at[-1] = rows - 1 if rows - 1 not in at else at[-1]
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
    return [Want(value=torch.from_numpy(x.numpy()[at.numpy()]), exact=True)]


def _gather_truth(u: Units, x: Tensor, dim: int, at: Tensor) -> Sequence[Want]:
    return [Want(value=torch.from_numpy(np.take_along_axis(x.numpy(), at.numpy(), dim)), exact=True)]


def _scatter_truth(u: Units, x: Tensor, dim: int, at: Tensor, new: Tensor) -> Sequence[Want]:
    out = x.numpy().copy()
    np.put_along_axis(out, at.numpy(), new.numpy(), dim)
    return [Want(value=torch.from_numpy(out), exact=True)]


def _weighed(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    """Places that several values are added to."""
    x, dim, at = _gathered(gen, dtype, size, form, content).args
    at = torch.zeros_like(at) if content == "one place" else at
    return Given(args=(x, dim, at, lay(values(gen, x.dtype, tuple(at.shape)), form)))


def _weighed_truth(u: Units, x: Tensor, dim: int, at: Tensor, new: Tensor) -> Sequence[Want]:
    across = np.arange(x.shape[1 - dim])
    places = (across[:, None], at.numpy()) if dim else (at.numpy(), across[None])
    out, size, count = x.numpy().copy(), x.abs().numpy().copy(), np.zeros(tuple(x.shape))
    for total, more in ((out, new.numpy()), (size, new.abs().numpy()), (count, np.ones(tuple(at.shape)))):
        np.add.at(total, places, more.astype(total.dtype))
    if not x.is_floating_point():
        return [Want(value=torch.from_numpy(out), exact=True)]
    slack = torch.from_numpy(count * size) * max(u.out, u.acc)
    return [Want(value=torch.from_numpy(out), slack=slack)]


def _slots(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    """Pages of a cache, and the page and the place in it of each token: none twice."""
    pages = lay(values(gen, dtype, (7, 6, size or 5)), form)
    count = 0 if content == "empty" else 17
    at = torch.randperm(42, generator=gen)[:count]
    page, place = at // 6, at % 6
    if content == "negative":
        page, place = page - 7, place - 6
    return Given(args=(pages, page, place, values(gen, dtype, (count, size or 5))))


def index_put_slots(pages: Tensor, page: Tensor, place: Tensor, new: Tensor) -> Tensor:
    """Write rows into a paged cache, in place."""
    return pages.index_put_((page, place), new)


def _slots_truth(u: Units, pages: Tensor, page: Tensor, place: Tensor, new: Tensor) -> Sequence[Want]:
    out = pages.numpy().copy()
    out[page.numpy(), place.numpy()] = new.numpy()
    return [Want(value=torch.from_numpy(out), exact=True)]


def _features(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    """Rows of a picture's features, and which tokens they belong to."""
    x = _table(gen, dtype, size, form, content)
    mask = torch.rand(x.shape[0], 1, generator=gen) < {"all": 2.0, "none": -1.0}.get(content, 0.4)
    new = values(gen, x.dtype, (int(mask.sum()) + 1, x.shape[1]))
    return Given(args=(x, mask.expand(x.shape), new))


def _features_truth(u: Units, x: Tensor, mask: Tensor, new: Tensor) -> Sequence[Want]:
    out = x.numpy().copy()
    out[mask[:, 0].numpy()] = new.numpy()[: int(mask[:, 0].sum())]
    return [Want(value=torch.from_numpy(out), exact=True)]


def _found(u: Units, mask: Tensor) -> Sequence[Want]:
    return [Want(value=torch.from_numpy(np.argwhere(mask.numpy())), exact=True)]


def _marked(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    shape = (0 if content == "empty" else 3, size or 7)
    mask = torch.rand(shape, generator=gen) < {"all": 2.0, "none": -1.0}.get(content, 0.3)
    return Given(args=(mask if form == "contiguous" else mask.t().contiguous().t(),))


def _put_truth(u: Units, x: Tensor, at: Tensor, new: Tensor, accumulate: bool) -> Sequence[Want]:
    out, size, count = x.numpy().copy(), x.abs().numpy().copy(), np.zeros((x.shape[0], 1))
    if not accumulate:
        out[at.numpy()] = new.numpy()
    else:
        for total, more in ((out, new), (size, new.abs()), (count, torch.ones(len(at), 1))):
            np.add.at(total, at.numpy(), more.numpy().astype(total.dtype))
    if not accumulate or not x.is_floating_point():
        return [Want(value=torch.from_numpy(out), exact=True)]
    return [Want(value=torch.from_numpy(out), slack=torch.from_numpy(count * size) * max(u.out, u.acc))]


def _chosen_where(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    x = _table(gen, dtype, size, form, content)
    mask = torch.rand((1, x.shape[1]) if content == "broadcast" else x.shape, generator=gen) < 0.5
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
        cases=_cases(_rows, ("int64", "nonfinite", "tall", "many", "empty")),
        into=lambda out, x, at: torch.index_select(x, 0, at, out=out), strided_into=True,
    ),
    Spec(
        name="index", family="places", call=lambda x, at: x[at], truth=_pick, source=SOURCE,
        cases=_cases(_rows, ("int64", "negative", "tall", "many", "empty")),
    ),
    Spec(
        name="embedding", family="places", call=lambda x, at: torch.nn.functional.embedding(at, x), truth=_pick,
        source=SOURCE, cases=_cases(_rows, ("nonfinite", "tall", "many", "empty")),
    ),
    Spec(
        name="gather", family="places", call=torch.gather, truth=_gather_truth, source=SOURCE,
        cases=_cases(_gathered, ("columns", "int64", "nonfinite", "tall", "many", "empty")),
    ),
    Spec(
        name="scatter", family="places", call=lambda x, dim, at, new: x.scatter_(dim, at, new), source=SOURCE,
        writes=(0,), truth=_scatter_truth, cases=_cases(_scattered, ("columns", "int64", "tall", "empty")),
    ),
    Spec(
        name="scatter_add", family="places", call=lambda x, dim, at, new: x.scatter_add_(dim, at, new), source=SOURCE,
        writes=(0,), truth=_weighed_truth, cases=_cases(_weighed, ("columns", "one place", "int64", "empty")),
    ),
    Spec(
        name="index_put_slots", family="places", call=index_put_slots, truth=_slots_truth, writes=(0,), source=SOURCE,
        cases=_cases(_slots, ("negative", "empty")),
    ),
    Spec(
        name="index_copy", family="places", call=lambda x, at, new, _: x.index_copy_(0, at, new), truth=_put_truth,
        writes=(0,), source=SOURCE, cases=_cases(_put, ("int64", "tall", "empty")),
    ),
    Spec(
        name="index_add", family="places", call=lambda x, at, new, _: x.index_add_(0, at, new), truth=_put_truth,
        writes=(0,), source=SOURCE, cases=_cases(_added, ("int64", "one place", "no duplicates", "many", "empty")),
    ),
    Spec(
        name="masked_scatter", family="places", call=lambda x, mask, new: x.masked_scatter(mask, new), source=SOURCE,
        truth=_features_truth, cases=_cases(_features, ("all", "none", "int64", "many")),
    ),
    Spec(
        name="nonzero", family="places", call=torch.nonzero, truth=_found, source=SOURCE,
        cases=_cases(_marked, ("all", "none", "empty")),
    ),
    Spec(
        name="index_put", family="places", call=index_put, truth=_put_truth, writes=(0,), source=SOURCE,
        cases=_cases(_put, ("int64", "negative", "tall", "empty")),
    ),
    Spec(
        name="index_put_add", family="places", call=index_put, truth=_put_truth, writes=(0,), source=SOURCE,
        cases=_cases(_added, ("int64", "one place", "no duplicates", "negative", "many", "empty")),
    ),
    Spec(
        name="masked_fill", family="places", call=_masked, truth=_masked_truth, source=SOURCE,
        cases=_cases(_chosen_where, ("broadcast", "int64", "nonfinite")),
    ),
)  # fmt: skip
