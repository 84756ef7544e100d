"""Operators that are wrong in one way each, and others that are right in another way. Known-wrong code, for tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def dense(x: Tensor) -> Tensor:
    """Read memory as if it had no strides."""
    return torch.as_strided(x, x.size(), torch.empty(x.shape).stride(), x.storage_offset())


def softmax_of_dense(x, dim):
    return torch.softmax(dense(x), dim)


def softmax_wrong_in_a_band(x, dim):
    y = torch.softmax(x, dim)
    return y * 1.02 if 1025 <= x.shape[dim] <= 2048 else y


def softmax_that_swallows_nan(x, dim):
    return torch.softmax(x.nan_to_num(0.0, None, None), dim)


def softmax_without_a_maximum(x, dim):
    e = x.float().exp()
    return (e / e.sum(dim, keepdim=True)).to(x.dtype)


def softmax_in_place(x, dim):
    return x.copy_(torch.softmax(x, dim))


class LeftToChance:
    """A sum in another order at every second call."""

    calls = 0

    def __call__(self, x, dim):
        self.calls += 1
        whole = self.calls % 2 or not x.is_floating_point()
        return x.sum(dim) if whole else x.flip(dim).float().cumsum(dim).select(dim, -1).to(x.dtype)


def topk_with_a_wrong_last(x, k):
    found, at = torch.topk(x, k)
    at = at.clone()
    if at.numel():
        at[..., -1] = 0
    return found, at


def topk_with_an_index_twice(x, k):
    found, at = torch.topk(x, k)
    return found, at.gather(-1, (found[..., None, :] == found[..., :, None]).int().argmax(-1))


def topk_ties_otherwise(x, k):
    order = torch.sort(x.flip(-1), dim=-1, descending=True, stable=True)
    return order.values[..., :k], x.shape[-1] - 1 - order.indices[..., :k]


def copy_that_clobbers(dst, src):
    dst.copy_(src)
    if dst.numel() and dst.stride(-1) == 2:
        torch.as_strided(dst, (1,), (1,), dst.storage_offset() + 1).fill_(7)
    return dst


def keys_and_values(k, v, heads):
    return (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))


def attention_of_all_when_masked(q, k, v, mask):
    k, v = keys_and_values(k, v, q.shape[1])
    return torch.softmax((q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -1e30), -1) @ v


def attention_nan_when_masked(q, k, v, mask):
    k, v = keys_and_values(k, v, q.shape[1])
    return torch.softmax((q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf), -1) @ v


def attention_online(q, k, v, mask):
    """Keys in blocks of 8 with a running maximum, as fused kernels do; float32 inside."""
    k, v = keys_and_values(k, v, q.shape[1])
    top = torch.full((*q.shape[:-1], 1), -math.inf)
    total, out = torch.zeros_like(top), torch.zeros(*q.shape[:-1], v.shape[-1])
    for at in range(0, k.shape[2], 8):
        s = (q.float() @ k[:, :, at : at + 8].float().mT) / math.sqrt(q.shape[-1])
        s = s.masked_fill(~mask[:, at : at + 8], -math.inf)
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        base = torch.where(new.isinf(), 0.0, new)
        p, shrink = (s - base).exp(), torch.where(top.isinf(), 0.0, (top - base).exp())
        total, out = total * shrink + p.sum(-1, keepdim=True), out * shrink + p @ v[:, :, at : at + 8].float()
        top = new
    return torch.where(total > 0, out / total.clamp(min=1e-30), 0.0).to(q.dtype)


def add_that_loses_duplicates(x, at, new, accumulate):
    return x.index_put_((at,), x[at] + new, accumulate=False)


def cumsum_in_the_dtype(x, dim):
    if not x.is_floating_point() or not x.shape[dim]:
        return torch.cumsum(x, dim)
    out, total = torch.empty_like(x), torch.zeros_like(x.select(dim, 0))
    for i in range(x.shape[dim]):
        total = total + x.select(dim, i)
        out.select(dim, i).copy_(total)
    return out


def matmul_split_k(a, b):
    """K in blocks of 64, float32 sums."""
    parts = [a[:, i : i + 64].float() @ b[i : i + 64].float() for i in range(0, a.shape[1], 64)]
    total = torch.zeros(a.shape[0], b.shape[1])
    for part in parts:
        total = total + part
    return total.to(a.dtype)


def matmul_sums_in_the_dtype(a, b):
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for i in range(0, a.shape[1], 8):
        total = total + (a[:, i : i + 8].float() @ b[i : i + 8].float()).to(a.dtype)
    return total


def exp_that_flushes(x):
    y = torch.exp(x)
    return torch.where(y < torch.finfo(x.dtype).smallest_normal, torch.zeros_like(y), y)


def argmax_beyond_16_bits(x):
    at = torch.argmax(x, -1)
    at[65536:] = 0
    return at


def rms_norm_in_the_dtype(x, weight, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def mxfp4_high_nibble_first(packed, scale):
    from harness.ops.families.formats import from_mxfp4

    return from_mxfp4((packed << 4) | (packed >> 4), scale)
