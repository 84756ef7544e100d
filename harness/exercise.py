"""What a worker does beyond a forward: chat front end, two requests at once, an endpoint, collectives. Returns facts.

Knows adapters and their capabilities (checked by the caller, so an adapter is any object here); must not know what the
other side answered, limits or files. Facts are plain JSON: whether they are right is decided elsewhere.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.adapter import Inputs, TokenIds, capabilities, silent
from harness.cases import seeded_image
from harness.errors import PortError
from harness.metrics import collectives as exact
from harness.types import Case, Facts, Image, Run


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


def serve(port: Any, run: Run, beat: Callable[[str], None]) -> Facts:
    """Hold the port's endpoint against the port itself, called without HTTP (run kind `serve`).

    Options: `prompts` (texts, beside the token ids of the run's case), `conversations`, `picture` (height and width of
    one in a further conversation), `timeout_s`.
    Returns: what `harness.adapters.smoke.smoke` returns.
    """
    from harness.adapters.smoke import smoke

    if run.case is None:
        raise PortError(f"run {run.id}: expected a case, found none")
    beat("starting the server")
    base_url = port.serve()
    count, cases, chats = run.case.max_new_tokens, [run.case], []
    front = "chat" in capabilities(port)
    if front:
        cases += [Case(id=f"prompt-{i}", prompt=p, max_new_tokens=count) for i, p in enumerate(run.options["prompts"])]
        talks = [tuple(messages) for messages in run.options["conversations"]]
        chats = [Case(id=f"chat-{i}", messages=talk, max_new_tokens=count) for i, talk in enumerate(talks)]
        if "picture" in run.options:
            height, width = run.options["picture"]
            image = seeded_image(height, width, seed=4)
            told = ({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},)
            chats.append(Case(id="chat-picture", messages=told, images=(image,), max_new_tokens=count))
    return smoke(
        base_url,
        [_request_of(port, case, front) for case in cases],
        chats=[_request_of(port, case, front) for case in chats],
        max_length_tokens=port.scope.max_length_tokens,
        timeout_s=float(run.options.get("timeout_s", 60)),
        beat=beat,
    )


def _request_of(port: Any, case: Case, front: bool) -> dict[str, Any]:
    """Return a request and, unless the port is nothing but an endpoint, what it answers without one."""
    request: dict[str, Any] = {"id": case.id, "max_tokens": case.max_new_tokens}
    if case.messages is not None:
        request["messages"] = _over_http(case)
    else:
        request["prompt"] = case.prompt if case.prompt is not None else list(case.token_ids or ())
    if "*" in port.scope.unobservable:
        return request
    inputs = port.prepare(case, silent)
    ids = _ids(port.generate(inputs, case.max_new_tokens, silent))
    answer: dict[str, Any] = {"prompt_tokens": int(inputs.token_ids.shape[-1]), "token_ids": ids}
    if "phases" in capabilities(port):
        answer["ties"] = partial(_ties, port, inputs, ids)
    if front:
        ending = port.eos_ids()
        answer |= {"text": port.decode(ids), "ended": bool(ids) and ids[-1] in ending}
    return request | {"expected": answer}


def _over_http(case: Case) -> list[dict[str, Any]]:
    """Return a conversation as it goes over the wire: each picture as a PNG in a `data:` URL where its mark stood."""
    urls = iter([f"data:image/png;base64,{base64.b64encode(png(image)).decode()}" for image in case.images])

    def part_of(part: Any) -> Any:
        return {"type": "image_url", "image_url": {"url": next(urls)}} if part.get("type") == "image" else part

    return [
        {**m, "content": [part_of(p) for p in m["content"]] if isinstance(m["content"], list) else m["content"]}
        for m in case.messages or ()
    ]


def png(image: Image) -> bytes:
    """Return a picture as a PNG file: no filter, one block of data."""
    row = 3 * image.width
    rgb = base64.b64decode(image.rgb)
    lines = b"".join(b"\0" + rgb[at : at + row] for at in range(0, len(rgb), row))

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", image.width, image.height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def _ties(port: Any, inputs: Inputs, ids: TokenIds) -> list[list[int]]:
    """Return for each token that a port generated the ids that it might as well have taken, rounded otherwise.

    Those whose logit lies below the best by no more than twice what the port's own phases, one prefill and single
    steps, differ by at most: each of two logits may move by that much.
    """
    prompt, first = inputs.token_ids, inputs.token_ids.shape[-1]
    token_ids = torch.cat([prompt, torch.tensor([ids], device=prompt.device)], dim=-1)
    whole = Inputs(token_ids=token_ids, extras=inputs.extras)
    end = first + len(ids) - 1
    prefill = port.forward(whole, silent)[0, first - 1 : end].double()
    slot = port.open()
    try:
        spans = [(0, first), *((at, at + 1) for at in range(first, end))]
        steps = torch.cat([port.step(slot, whole, start, stop, silent)[0, -1:].double() for start, stop in spans])
    finally:
        port.free(slot)
    moved = (steps - prefill).abs().max()
    behind = prefill.amax(dim=-1, keepdim=True) - prefill
    return [row.nonzero()[:, 0].tolist() for row in behind <= 2 * moved]


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
