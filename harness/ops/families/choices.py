"""What chooses: top-k, sort, argmax, and drawing a token. Knows rules of ties and NaN; must not know devices.

Values must be equal and in order, indices must point at them, none twice; which of equal ones is free, except in a
stable sort. NaN is the greatest, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from harness.ops.arithmetic import Units
from harness.ops.case import Case, Chosen, Drawn, Given, Spec, Within
from harness.ops.inputs import ODD_ROWS, lay, long_widths, one, sweep, values

SOURCE = "equality; order of ties free, NaN greatest (torch.topk, torch.sort)"
DRAWS = 512


def sample(logits: Tensor, temperature: float, top_p: float, draws: int) -> Tensor:
    """Return `draws` token ids a row: the greatest at temperature 0, else drawn from the fewest that make `top_p`."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True).expand(-1, draws)
    p = torch.softmax(logits.float() / temperature, -1)
    ranked = p.sort(dim=-1, descending=True)
    kept = ranked.values.masked_fill(ranked.values.cumsum(-1) - ranked.values >= top_p, 0.0)
    return torch.gather(ranked.indices, -1, torch.multinomial(kept, draws, replacement=True))


def _scores(gen: torch.Generator, dtype: torch.dtype, size: int, content: str) -> Tensor:
    rows = {"empty": 0, "many rows": 65539}.get(content, ODD_ROWS)
    if content == "int64":
        return values(gen, torch.int64, (rows, size))
    x = values(gen, dtype, (rows, 8 if content == "many rows" else size or 7), content)
    if content == "masked":
        x[:, size // 2 :] = float("-inf")
    if content in ("normal", "few") and size > 2:
        x[0, -1], x[1, size // 2] = 9.0, 9.0  # the greatest one lies last, and in the middle
    return x


def _topk(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    count = {"all of them": size, "the first": 1}.get(content, max(1, size // 3))
    return Given(args=(lay(_scores(gen, dtype, size, content), form), min(count, 64) if content == "few" else count))


def _alone(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    return Given(args=(lay(_scores(gen, dtype, size, content), form),))


CONTENTS = ("ties", "masked", "nonfinite", "int64", "empty")


def _topk_cases(full: bool) -> Iterator[Case]:
    yield from sweep(_topk, full=full, contents=(*CONTENTS, "all of them", "the first"))
    for size in (2049, 32771, 131101) if full else (2049, 32771):
        yield one(_topk, size, "contiguous", "few")
    yield one(_topk, 8, "contiguous", "many rows")


def _cases(contents: tuple[str, ...]) -> Callable[[bool], Iterator[Case]]:
    return lambda full: sweep(_alone, full=full, sizes=long_widths(full), contents=contents)


def _logits(gen: torch.Generator, dtype: torch.dtype, size: int, form: str, content: str) -> Given:
    x = values(gen, dtype, (ODD_ROWS, size), "ties" if content.endswith("ties") else "large")
    x = x if content.endswith("ties") else x / 60
    rule = {"greedy": (0.0, 1.0), "hot": (1.7, 1.0)}.get(content.partition(" ")[0], (0.7, 0.6))
    return Given(args=(lay(x, form), *rule, DRAWS))


def _support(u: Units, logits: Tensor, temperature: float, top_p: float, draws: int) -> Sequence[Within | Drawn]:
    """Return the distribution where nothing is left out; else which tokens may be drawn.

    One at the edge of `top_p` may or may not, within the roundings of a sum.
    """
    if temperature == 0:
        return [Within(allowed=logits == logits.amax(-1, keepdim=True))]
    p = torch.softmax(logits / temperature, -1)
    if top_p >= 1:
        return [Drawn(probabilities=p)]
    greater = (p[:, None, :] * (p[:, None, :] > p[:, :, None])).sum(-1)  # what lies strictly before each token
    edge = (p.shape[-1] + 8) * u.inside + 2 * u.exp
    return [Within(allowed=greater < top_p + edge)]


def _sample_cases(full: bool) -> Iterator[Case]:
    for size in (7, 129, 301) if full else (129,):
        for content in ("greedy", "greedy with ties", "top-p", "top-p with ties", "hot", "hot with ties"):
            yield one(_logits, size, "contiguous", content)
    yield one(_logits, 129, "strided", "greedy")


SPECS = (
    Spec(
        name="topk", family="choices", call=torch.topk, cases=_topk_cases, source=SOURCE,
        truth=lambda u, x, k: [Chosen(scores=x, count=k)],
    ),
    Spec(
        name="sort", family="choices", call=lambda x: torch.sort(x, dim=-1, descending=True), source=SOURCE,
        truth=lambda u, x: [Chosen(scores=x, count=x.shape[-1])], cases=_cases(CONTENTS),
    ),
    Spec(
        name="stable_sort", family="choices", call=lambda x: torch.sort(x, dim=-1, stable=True), source=SOURCE,
        truth=lambda u, x: [Chosen(scores=x, count=x.shape[-1], least=True, ordered=True)],
        cases=_cases(("ties", "int64")),
    ),
    Spec(
        name="argmax", family="choices", call=lambda x: torch.argmax(x, -1), source=SOURCE,
        truth=lambda u, x: [Chosen(scores=x, count=1, alone=True)], cases=_cases((*CONTENTS, "many rows")),
    ),
    Spec(
        name="sample", family="choices", call=sample, truth=_support, cases=_sample_cases, plain=False, sampled=True,
        source="Holtzman et al. 2020: the fewest tokens whose probabilities reach p; temperature 0 is the greatest",
    ),
)  # fmt: skip
