"""A port's endpoint held against the port itself, called without HTTP: the requests, and what each should answer.

Knows adapters and their capabilities (checked by the caller, so an adapter is any object here); must not know HTTP,
limits or files.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from harness.adapter import Inputs, TokenIds, capabilities, silent
from harness.cases import seeded_image
from harness.errors import PortError
from harness.types import Case, Facts, Image, Run


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
    ids = [int(token) for token in port.generate(inputs, case.max_new_tokens, silent)]
    answer: dict[str, Any] = {"prompt_tokens": int(inputs.token_ids.shape[-1]), "token_ids": ids}
    if "phases" in capabilities(port):
        answer["unlikely"] = partial(_unlikely, port, inputs)
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


def _unlikely(port: Any, inputs: Inputs, ids: TokenIds) -> int | None:
    """Return the place of the first of some tokens that the port would not have chosen there; None if there is none.

    A server may round otherwise than the port called alone: it cuts a prompt elsewhere, and batches. So a token may be
    another than the port's by rounding, and everything after it is judged as a sequel of what was said, not of what the
    port said. How far rounding moves logits the port's own phases say, one prefill and single steps over these tokens:
    the root mean square of what they differ by, here or over all places, whichever is more. A token may lie behind the
    best of either phase by four times what that makes of the difference of two logits.
    """
    vocabulary = port.forward(inputs, silent).shape[-1]
    strange = [place for place, token in enumerate(ids) if not 0 <= token < vocabulary]
    if strange:  # no port takes them
        return strange[0]
    first, end = inputs.token_ids.shape[-1], inputs.token_ids.shape[-1] + len(ids) - 1
    whole = _followed(inputs, ids)
    prefill = port.forward(whole, silent)[0, first - 1 : end].double().cpu()
    slot = port.open()
    try:
        spans = [(0, first), *((at, at + 1) for at in range(first, end))]
        steps = torch.cat([port.step(slot, whole, *span, silent)[0, -1:].double().cpu() for span in spans])
    finally:
        port.free(slot)
    said = torch.tensor(ids)[:, None]
    behind = torch.stack(
        [(logits.amax(-1, keepdim=True) - logits.gather(-1, said))[:, 0] for logits in (prefill, steps)]
    )
    moved = (steps - prefill).var(dim=-1, correction=0)
    most = 4 * (2 * torch.maximum(moved, moved.mean())).sqrt()
    places = (behind.amin(0) > most).nonzero()[:, 0].tolist()
    return places[0] if places else None


def _followed(inputs: Inputs, ids: TokenIds) -> Inputs:
    """Return a request with tokens of text behind it; their positions, if it has any, go on from its greatest."""
    device, positions = inputs.token_ids.device, inputs.position_ids
    if positions is not None:
        further = positions.amax() + torch.arange(1, len(ids) + 1, device=device)
        positions = torch.cat([positions, further.expand(*positions.shape[:-1], -1)], dim=-1)
    token_ids = torch.cat([inputs.token_ids, torch.tensor([ids], device=device)], dim=-1)
    return Inputs(token_ids=token_ids, position_ids=positions, extras=inputs.extras)
