"""Quantise and dequantise a tensor, exactly as a format says. Knows tensors; must not know names or modules.

The scale is the largest magnitude over the largest number of the format (for MX formats the power of two below it, OCP
Microscaling 1.0 section 6.3; for NVFP4 an FP8 scale for each 16 under one for the whole). Rounding is to nearest, ties
to even, and saturates. NaN propagates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.precision.scheme import FORMATS, Format, Scheme

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_BITS = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}
_MX_EXPONENTS = (-127, 127)


def quantised(tensor: Tensor, scheme: Scheme, *, peak: Tensor | None = None, nudge: float = 1.0) -> Tensor:
    """Return a tensor rounded to a scheme and back, in its own dtype.

    `peak` stands for the largest magnitudes (see `peaks`), where they are those of more than this tensor; `nudge`
    multiplies them, as a port does that takes its scale from elsewhere.
    Shapes: any; of weights the last two axes are [out, in], of keys and values [batch, head, token, feature].
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    if scheme.format.wide:
        narrow = tensor.clamp(-scheme.format.largest, scheme.format.largest) if scheme.format.largest < 1e6 else tensor
        return narrow.to(_DTYPES[scheme.format.name]).to(tensor.dtype)
    x, shape = _wide(tensor), tensor.shape
    if scheme.rows:
        return _unblocked(_rounded(*_blocks(x, scheme), scheme, nudge), shape, scheme).to(tensor.dtype)
    largest = peaks(x, scheme) if peak is None else peak.to(x.dtype)
    return _rounded(x, largest, scheme, nudge).to(tensor.dtype)


def peaks(tensor: Tensor, scheme: Scheme) -> Tensor:
    """Return the largest magnitudes that share a scale, broadcastable to the tensor; not for blocks and groups."""
    size, dims = _wide(tensor).abs(), tensor.dim()
    if scheme.granularity in ("token", "channel"):
        return size.amax(dim=-1, keepdim=True)
    if scheme.granularity == "head" and dims >= 4:
        return size.amax(dim=[d for d in range(dims) if d != 1], keepdim=True)
    return size.amax().reshape([1] * dims)


def steps(tensor: Tensor, scheme: Scheme) -> Tensor:
    """Return the distance between neighbouring numbers of a scheme at each element, in float32 or wider."""
    x, shape, form = _wide(tensor), tensor.shape, scheme.format
    parts, largest = _blocks(x, scheme) if scheme.rows else (x, peaks(x, scheme) if not form.wide else x.abs())
    scale = torch.ones_like(largest) if form.wide else _scales(largest, scheme)
    step = scale.expand_as(parts) if form.mantissa is None else _spacing(parts / scale, form) * scale
    return _unblocked(step, shape, scheme) if scheme.rows else step


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in _BITS else tensor.float()


def _rounded(x: Tensor, largest: Tensor, scheme: Scheme, nudge: float) -> Tensor:
    """Round to the grid. What is as large as the format holds keeps its value, so rounding twice is rounding once."""
    scale = _scales(largest * nudge if nudge != 1.0 else largest, scheme)
    code = _to_grid(torch.where(scale > 0, x / scale, 0.0 * x), scheme.format)
    back = code * scale
    if scheme.granularity == "cast" or scheme.power_of_two or scheme.two_scales or nudge != 1.0:
        return back
    return torch.where(code.abs() == scheme.format.largest, largest.copysign(code), back)


def _scales(largest: Tensor, scheme: Scheme) -> Tensor:
    if scheme.granularity == "cast":
        return torch.ones_like(largest)
    if scheme.power_of_two:
        exponent = _exponent(largest) - _exponent(torch.tensor(scheme.format.largest, dtype=largest.dtype))
        low, high = _MX_EXPONENTS
        usual = largest > 0
        return torch.where(usual, _power(exponent.clamp(max(low, -126), high), largest.dtype), 1.0 + 0.0 * largest)
    if scheme.two_scales:
        fp8 = FORMATS["float8_e4m3fn"]
        whole = largest.amax() / (fp8.largest * scheme.format.largest)
        whole = torch.where(whole > 0, whole, 1.0 + 0.0 * whole)
        return _to_grid(largest / scheme.format.largest / whole, fp8) * whole
    scale = largest / scheme.format.largest
    return torch.where(scale > 0, scale, 1.0 + 0.0 * scale)


def _to_grid(x: Tensor, form: Format) -> Tensor:
    """Round to the numbers of a format, unscaled."""
    if form.mantissa is None:
        return x.round().clamp(-form.largest, form.largest)
    step = _spacing(x, form)
    return ((x / step).round() * step).clamp(-form.largest, form.largest)


def _spacing(x: Tensor, form: Format) -> Tensor:
    assert form.mantissa is not None
    return _power(_exponent(x).clamp(form.least_exponent, 126) - form.mantissa, x.dtype)


def _exponent(x: Tensor) -> Tensor:
    """Return floor(log2 |x|), exactly."""
    return torch.frexp(x).exponent - 1


def _power(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 2^exponent for normal numbers, exactly."""
    integer, bits, bias = _BITS[dtype]
    return ((exponent.to(integer) + bias) << bits).view(dtype)


def _blocks(x: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Return a tensor cut in blocks [..., R, rows, C, columns], and the largest magnitude of each; edges are padded."""
    if x.dim() == 1:
        x = x[None]
    rows, columns = x.shape[-2:]
    down, across = -rows % scheme.rows, -columns % scheme.columns
    padded = torch.nn.functional.pad(x, (0, across, 0, down)) if down or across else x
    cut = padded.reshape(*x.shape[:-2], -1, scheme.rows, (columns + across) // scheme.columns, scheme.columns)
    return cut, cut.abs().amax(dim=(-3, -1), keepdim=True)


def _unblocked(blocks: Tensor, shape: torch.Size, scheme: Scheme) -> Tensor:
    *lead, down, rows, across, columns = blocks.shape
    whole = blocks.reshape(*lead, down * rows, across * columns)
    if len(shape) == 1:
        return whole[0, : shape[0]]
    return whole[..., : shape[-2], : shape[-1]]
