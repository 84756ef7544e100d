"""From cases to what a step takes: text, ids, patches. Knows the text front end; must not know the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_impl import vision
from accel_impl.config import Config
from accel_impl.tokenizer import TextFront
from harness.adapter import Inputs, Recorder, TokenIds
from harness.errors import PortError
from harness.types import Case


class Preparing:
    """Inputs of the port, and its capability `chat` (`harness.adapter`)."""

    checkpoint: Path
    config: Config
    _front: TextFront | None = None

    # ---- inputs

    def prepare(self, case: Case, record: Recorder) -> Inputs:
        """Tokenise, insert the pictures' rows, flatten pictures into patches."""
        ids, extras = self._ids(case), {}
        if case.images:
            if self.config.vision is None:
                raise PortError("expected a checkpoint with a vision tower for a case with pictures, found none")
            pixel_values, grid = vision.pixels(case.images, self.config.vision)
            merged = [int(n) // self.config.vision.spatial_merge_size**2 for n in grid.prod(-1)]
            ids = self._with_pictures(ids, case, merged)
            extras = {"pixel_values": pixel_values, "image_grid": grid}
        token_ids = record("inputs.token_ids", torch.tensor([ids], dtype=torch.int64), dims="batch token")
        positions = record("inputs.position_ids", torch.arange(len(ids))[None], dims="batch token")
        if extras:
            extras["pixel_values"] = record("inputs.pixel_values", extras["pixel_values"], dims="patch feature")
            extras["image_grid"] = record("inputs.image_grid", extras["image_grid"], dims="image axis")
        return Inputs(token_ids=token_ids, position_ids=positions, extras=extras)

    def _ids(self, case: Case) -> TokenIds:
        if case.token_ids is not None:
            return list(case.token_ids)
        if case.messages is not None:
            return self.front().encode(self.render(case.messages), special=False)
        if case.prompt is None:
            raise PortError(f"expected a prompt, messages or token ids in case {case.id}, found none")
        return self.encode(case.prompt)

    def _with_pictures(self, ids: TokenIds, case: Case, merged: Sequence[int]) -> TokenIds:
        """Put each picture's run of placeholders where the case says, or where a placeholder stands in the text."""
        token = self.config.image_token_id
        if case.token_ids is not None:
            at = list(case.image_at)
            if len(at) != len(merged):
                raise PortError(f"expected a place for each of {len(merged)} pictures in {case.id}, found {at}")
            result: TokenIds = []
            for index in range(len(ids) + 1):
                for place, count in zip(at, merged, strict=True):
                    result += [token] * count if place == index else []
                result += ids[index : index + 1]
            return result
        if ids.count(token) != len(merged):
            raise PortError(f"expected {len(merged)} <image> in {case.id}, found {ids.count(token)}")
        counts = iter(merged)
        return [i for one in ids for i in ([token] * next(counts) if one == token else [one])]

    # ---- text

    def front(self) -> TextFront:
        """Return the text front end, opened on first use."""
        if self._front is None:
            self._front = TextFront(self.checkpoint)
        return self._front

    def encode(self, text: str) -> TokenIds:
        """Tokenise plain text as a prompt."""
        return self.front().encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn ids into text."""
        return self.front().decode(token_ids)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render a conversation."""
        return self.front().render(messages)

    def eos_ids(self) -> frozenset[int]:
        """Return the ids that end a generation."""
        return frozenset(self.config.eos_token_id)


def appended(inputs: Inputs, tokens: TokenIds) -> Inputs:
    """Return the request with more tokens, at the next positions."""
    more = torch.tensor([tokens], dtype=torch.int64)
    ids = torch.cat((inputs.token_ids, more), dim=1)
    positions = inputs.position_ids
    if positions is not None:
        further = positions[..., -1:] + torch.arange(1, len(tokens) + 1)
        positions = torch.cat((positions, further), dim=-1)
    return Inputs(token_ids=ids, position_ids=positions, extras=inputs.extras)


def placeholders(inputs: Inputs, image_token_id: int) -> Tensor:
    """Return where rows of pictures go in a request [M], on the CPU."""
    return (inputs.token_ids[0] == image_token_id).nonzero().flatten().cpu()
