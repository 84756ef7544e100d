"""Several tokens in one step: drafted by the layer for one more token, verified by the model, rolled back where wrong.

Knows one request's slot; must not know other requests or how states are kept. What comes out is what greedy decoding
gives: a draft is only ever taken where the model's own logits choose the same token.

    place    n - 1     n         n + 1     n + 2           n tokens are in the cache, token n is known
    draft              -> d1     -> d2                     norm of n - 1 and token n; then the layer's own norm and d1
    verify             -> t1     -> t2     -> t3           tokens n, d1, d2 in one step: t1 always, t2 if d1 = t1, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accel_impl.model import Step
from accel_impl.prepare import appended
from accel_impl.store import SlotStore
from harness.adapter import Inputs, TokenIds, silent
from harness.errors import PortError
from harness.types import Facts

if TYPE_CHECKING:
    from accel_impl.port import AccelAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one turn gave: tokens in order with the logits [n, vocabulary] that chose them; how many were drafted."""

    tokens: TokenIds
    logits: Tensor
    drafted: int

    @property
    def accepted(self) -> int:
        """How many drafts were right."""
        return len(self.tokens) - 1


@torch.no_grad()
def turn(port: AccelAdapter, slot: int, inputs: Inputs, drafts: int) -> Turn:
    """Take a request on by at least one token, at most one more than `drafts`.

    `inputs` are its tokens, the last of them not in the cache yet. Afterwards the cache holds them and all tokens that
    the turn gave but the last.
    """
    memory = port.memory_in_use()
    start = inputs.token_ids.shape[-1] - 1
    guesses = drafted(port, slot, int(inputs.token_ids[0, -1]), drafts)
    before = memory.snapshot(slot)
    longer = appended(inputs, guesses)
    logits_TV = port.advance(slot, longer, start, start + 1 + len(guesses), silent).logits[0]
    chosen = [int(i) for i in logits_TV.argmax(-1)]
    right = next((n for n, guess in enumerate(guesses) if guess != chosen[n]), len(guesses))
    if right < len(guesses):  # states have no place: they go back to before the step, and on over what was right
        memory.restore(slot, before)
        port.advance(slot, longer, start, start + 1 + right, silent)
    return Turn(tokens=chosen[: right + 1], logits=logits_TV[: right + 1], drafted=len(guesses))


def generated(port: AccelAdapter, inputs: Inputs, count: int, drafts: int) -> tuple[TokenIds, Facts]:
    """Return at most `count` greedy tokens of a request, and how many were drafted and accepted on the way."""
    slot, ids, told = port.open(), list[int](), {"drafted": 0, "accepted": 0}
    limit, ends = port.config.max_position_embeddings - inputs.token_ids.shape[-1], port.config.eos_token_id
    try:
        logits = port.step(slot, inputs, 0, inputs.token_ids.shape[-1], silent)
        ids.append(int(logits[0, -1].argmax()))
        while ids[-1] not in ends and len(ids) < min(count, limit + 1):
            left = min(count, limit + 1) - len(ids)
            taken = turn(port, slot, appended(inputs, ids), min(drafts, left - 1))
            kept = next((n + 1 for n, token in enumerate(taken.tokens) if token in ends), len(taken.tokens))
            ids += taken.tokens[:kept]
            told = {"drafted": told["drafted"] + taken.drafted, "accepted": told["accepted"] + taken.accepted}
    finally:
        port.free(slot)
    return ids, told


def drafted(port: AccelAdapter, slot: int, token: int, count: int) -> TokenIds:
    """Return `count` guesses of what follows a token that comes next in a slot; the slot is left as it was."""
    memory, model, guesses = port.memory_in_use(), port.model, list[int]()
    if model is None:
        raise PortError("expected a loaded port, found none; call load first")
    start = memory.pages.lengths[slot]
    earlier_BTF = memory.states.norm[slot][None, None].clone()
    for place in range(start, start + count):
        store = SlotStore(memory, [slot], [place], 1)
        step = Step(token_ids_BT=torch.tensor([[token]]), positions_BT=torch.tensor([[place]]), total=0)
        logits_BTV, earlier_BTF = model.draft(step, earlier_BTF, store)
        token = int(logits_BTV[0, -1].argmax())
        guesses.append(token)
    memory.pages.truncate(slot, start)
    return guesses
