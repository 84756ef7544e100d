"""What a worker does beyond a forward: chat front end, two requests at once, collectives. Returns facts.

Knows adapters and their capabilities (checked by the caller, so an adapter is any object here); must not know what the
other side answered, limits or files. Facts are plain JSON: whether they are right is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from harness.adapter import TokenIds, silent
from harness.errors import PortError
from harness.metrics import collectives as exact
from harness.types import Case, Facts, Run


def chat(port: Any, options: Mapping[str, Any]) -> Facts:
    """Pass texts, ids and conversations through the port's own text front end (run kind `chat`).

    Options: `texts`, `ids` (lists of token ids to decode), `conversations` (lists of messages).
    Returns: `encoded` {text: ids}, `round_trip` and `decoded` [text], `rendered` [text], `prepared` [ids], `eos_ids`;
    `partial` {text: [its first ids, decoded]}, where a character of several tokens is cut.
    """
    encoded = {text: _ids(port.encode(text)) for text in options["texts"]}
    conversations = options["conversations"]
    cases = [Case(id=f"chat-{i}", messages=tuple(messages)) for i, messages in enumerate(conversations)]
    return {
        "encoded": encoded,
        "round_trip": [port.decode(ids) for ids in encoded.values()],
        "partial": {text: [port.decode(ids[:n]) for n in range(1, min(len(ids), 9))] for text, ids in encoded.items()},
        "decoded": [port.decode(list(ids)) for ids in options["ids"]],
        "rendered": [port.render(messages) for messages in conversations],
        "prepared": [_ids(port.prepare(case, silent).token_ids.flatten().tolist()) for case in cases],
        "eos_ids": sorted(_ids(port.eos_ids())),
    }


def concurrent(port: Any, run: Run, beat: Callable[[str], None]) -> Facts:
    """Run two requests of different length alone, then interleaved in two slots (run kind `concurrent`).

    Options: `other`, the token ids of the second request; the first is the run's case.
    Returns: `alone` and `together` [ids, ids]; `repeatable`, whether the first one alone gives the same twice;
    `max_logit_difference` over the steps whose ids agree so far.
    """
    if run.case is None or run.case.token_ids is None:
        raise PortError(f"run {run.id}: expected a case of token ids, found {run.case!r}")
    prompts = [list(run.case.token_ids), list(run.options["other"])]
    steps = run.case.max_new_tokens
    beat("two requests, each alone")
    alone = [_drain([_request(port, prompt, steps)])[0] for prompt in prompts]
    again = _drain([_request(port, prompts[0], steps)])[0]
    beat("two requests together")
    together = _drain([_request(port, prompt, steps) for prompt in prompts])
    worst = torch.zeros(())
    for (ids_a, logits_a), (ids_b, logits_b) in zip(alone, together, strict=True):
        for step, (a, b) in enumerate(zip(logits_a, logits_b, strict=True)):
            if ids_a[:step] == ids_b[:step]:
                worst = torch.maximum(worst, (a.double() - b.double()).abs().max())
    return {
        "repeatable": _equal(alone[0], again),
        "alone": [ids for ids, _ in alone],
        "together": [ids for ids, _ in together],
        "max_logit_difference": float(worst),
    }


def _equal(first: tuple[TokenIds, list[Tensor]], second: tuple[TokenIds, list[Tensor]]) -> bool:
    return first[0] == second[0] and all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


def _request(port: Any, prompt: TokenIds, steps: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (greedy token, logits of its step) of one request in its own slot, one per turn."""
    slot = port.open()
    try:
        ids, done = list(prompt), 0
        for _ in range(steps):
            inputs = port.prepare(Case(id="concurrent", token_ids=tuple(ids)), silent)
            logits = port.step(slot, inputs, done, len(ids), silent)[0, -1].detach().to("cpu", copy=True)
            done = len(ids)
            ids.append(int(logits.argmax()))
            yield ids[-1], logits
    finally:
        port.free(slot)


def _drain(requests: list[Iterator[tuple[int, Tensor]]]) -> list[tuple[TokenIds, list[Tensor]]]:
    """Take one step of each request in turn until all have ended."""
    results: list[tuple[TokenIds, list[Tensor]]] = [([], []) for _ in requests]
    live = list(range(len(requests)))
    while live:
        for index in list(live):
            step = next(requests[index], None)
            if step is None:
                live.remove(index)
            else:
                results[index][0].append(step[0])
                results[index][1].append(step[1])
    return results


def collectives(device: str, beat: Callable[[str], None]) -> Facts:
    """Run every collective for odd sizes and several dtypes on the default process group (run kind `collectives`).

    Returns: `checks`, one entry per operation, dtype and size with `wrong` elements of `elements`, and `unsupported`
    {operation/dtype: the backend's own words}.
    """
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    checks: list[dict[str, Any]] = []
    unsupported: dict[str, str] = {}
    for operation in exact.OPERATIONS:
        for label, dtype in exact.DTYPES.items():
            beat(f"{operation} {label}")
            for count in exact.COUNTS:
                wanted = exact.expected(operation, rank=rank, count=count, dtype=dtype, world=world)
                try:
                    found = _COLLECTIVES[operation](rank, world, count, dtype, device).cpu()
                except RuntimeError as error:
                    if not _is_unsupported(error):
                        raise
                    unsupported[f"{operation}/{label}"] = str(error).splitlines()[0][:200]
                    continue
                wrong = exact.wrong_elements(actual=found, expected=wanted)
                entry = {
                    "operation": operation,
                    "dtype": label,
                    "count": count,
                    "wrong": wrong,
                    "elements": wanted.numel(),
                }
                if wrong:
                    entry["first"] = exact.first_wrong(actual=found, expected=wanted)
                checks.append(entry)
    return {"checks": checks, "unsupported": unsupported, "backend": dist.get_backend(), "world": world}


def _is_unsupported(error: RuntimeError) -> bool:
    words = str(error).lower()
    return any(w in words for w in ("not support", "unsupported", "not implemented", "invalid scalar type"))


def _all_reduce(rank: int, world: int, count: int, dtype: torch.dtype, device: str) -> Tensor:
    import torch.distributed as dist

    value = exact.contribution(rank=rank, count=count, dtype=dtype, world=world).to(device)
    dist.all_reduce(value)
    return value


def _all_gather(rank: int, world: int, count: int, dtype: torch.dtype, device: str) -> Tensor:
    import torch.distributed as dist

    value = exact.contribution(rank=rank, count=count, dtype=dtype, world=world).to(device)
    parts = [torch.full_like(value, -1) for _ in range(world)]
    dist.all_gather(parts, value)
    return torch.cat(parts)


def _reduce_scatter(rank: int, world: int, count: int, dtype: torch.dtype, device: str) -> Tensor:
    import torch.distributed as dist

    parts = [
        exact.contribution(rank=rank, count=count, dtype=dtype, world=world, part=p).to(device) for p in range(world)
    ]
    value = torch.full_like(parts[0], -1)
    dist.reduce_scatter(value, parts)
    return value


def _all_to_all(rank: int, world: int, count: int, dtype: torch.dtype, device: str) -> Tensor:
    import torch.distributed as dist

    counts = exact.all_to_all_counts(rank=rank, count=count, world=world)
    parts = [exact.contribution(rank=rank, count=n, dtype=dtype, world=world, part=to) for to, n in enumerate(counts)]
    taken = [exact.all_to_all_counts(rank=r, count=count, world=world)[rank] for r in range(world)]
    value = torch.full((sum(taken),), -1, dtype=dtype, device=device)
    dist.all_to_all_single(value, torch.cat(parts).to(device), output_split_sizes=taken, input_split_sizes=counts)
    return value


def _broadcast(rank: int, world: int, count: int, dtype: torch.dtype, device: str) -> Tensor:
    import torch.distributed as dist

    value = exact.contribution(rank=rank, count=count, dtype=dtype, world=world).to(device)
    dist.broadcast(value, src=world - 1)
    return value


def _send_recv(rank: int, world: int, count: int, dtype: torch.dtype, device: str) -> Tensor:
    import torch.distributed as dist

    value = exact.contribution(rank=rank, count=count, dtype=dtype, world=world).to(device)
    found = torch.full_like(value, -1)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, value, (rank + 1) % world), dist.P2POp(dist.irecv, found, (rank - 1) % world)]
    )
    for work in works:
        work.wait()
    return found


_COLLECTIVES: dict[str, Callable[[int, int, int, torch.dtype, str], Tensor]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send_recv": _send_recv,
}


def _ids(values: Any) -> TokenIds:
    return [int(v) for v in values]
