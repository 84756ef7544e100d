"""Weights that a module holds as codes and scales, multiplied out. Knows names of scales and grids; no formats' tables.

A module that quantises holds `NAME.weight` in FP8 or int8 and its scale beside it: one number, one a row, or a grid of
blocks. What cannot be read so is given as it is; a port with a form of its own shows it by `weights()` itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

_SCALES = ("_scale_inv", "_scale", "_scales")
_CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def multiplied_out(state: Mapping[str, Tensor], stored: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values of a state, codes with a scale beside them as float32 and their scales left out.

    What the checkpoint stores under the very same names is left as it is: it can be compared as bytes.
    """
    scales = {name: scale for name in state if (scale := _scale_of(name, state)) and scale not in stored}
    used = set(scales.values())
    for name, value in state.items():
        if name in scales:
            whole = _whole(state[scales[name]], value.shape)
            yield name, value if whole is None else value.float() * whole
        elif name not in used:
            yield name, value


def _scale_of(name: str, state: Mapping[str, Tensor]) -> str:
    if state[name].dtype not in _CODES:
        return ""
    return next((name + end for end in _SCALES if name + end in state), "")


def _whole(scale: Tensor, shape: torch.Size) -> Tensor | None:
    """Return a scale as large as what it scales, or None where it does not fit."""
    scale = scale.float()
    if scale.numel() == 1:
        return scale.reshape([1] * len(shape))
    if scale.dim() == len(shape) - 1 and scale.shape == shape[:-1]:
        return scale.unsqueeze(-1)
    if scale.dim() != len(shape):
        return None
    for axis, (parts, size) in enumerate(zip(scale.shape, shape, strict=True)):
        if parts not in (1, size):
            block = 1 << (-(-size // parts) - 1).bit_length()  # edge blocks are partial, blocks are powers of two
            if -(-size // block) != parts:
                return None
            scale = scale.repeat_interleave(block, dim=axis).narrow(axis, 0, size)
    return scale
