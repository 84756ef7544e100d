"""Sparse attention of single queries by a kernel that reads rows out of the pages. Knows latents; must not know layers.

One program for each query and head: the softmax goes on from block to block of rows, beginning with the sink.

Legend: Q queries (requests x tokens), H heads, N rows of a pool, K chosen, L latent, R rotary, V value features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel_impl.formats import Resident

BLOCK = 16
"""Rows that are read together."""


def attend_decode(
    q_BTHD: Tensor, latent_NL: Tensor, rope_NR: Tensor, rows_BTK: Tensor, kv_b: Resident, sinks_H: Tensor, scale: float,
    *, block: int = BLOCK,
) -> Tensor:  # fmt: skip
    """Attend in latent space; kv_b is absorbed into the query and into the output. Shapes: as in `accel_impl.ops`."""
    heads, nope = q_BTHD.shape[2], q_BTHD.shape[-1] - rope_NR.shape[-1]
    weight_HDL = kv_b.decode(torch.float32).unflatten(0, (heads, -1))
    q_QHD = q_BTHD.float().flatten(0, 1)
    absorbed_QHL = torch.einsum("qhn,hnl->qhl", q_QHD[..., :nope], weight_HDL[:, :nope]).contiguous()
    turned_QHR, rows_QK = q_QHD[..., nope:].contiguous(), rows_BTK.flatten(0, 1).contiguous()
    latent, rope = latent_NL.contiguous(), rope_NR.contiguous()
    out_QHL = torch.empty_like(absorbed_QHL)
    widths = (latent.shape[1], rope.shape[1])
    if out_QHL.numel():
        _attend[(len(q_QHD), heads)](
            absorbed_QHL, turned_QHR, latent, rope, rows_QK, sinks_H.float().contiguous(), out_QHL, rows_QK.shape[1],
            scale, *widths, BLOCK=block, WIDE=triton.next_power_of_2(widths[0]),
            TURNED=triton.next_power_of_2(max(1, widths[1])),
        )  # fmt: skip
    mixed = torch.einsum("qhl,hvl->qhv", out_QHL, weight_HDL[:, nope:])
    return mixed.unflatten(0, q_BTHD.shape[:2]).to(q_BTHD.dtype).contiguous()


@triton.jit
def _attend(
    absorbed, turned, latent, rope, rows, sinks, out, count, scale, wide, narrow,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    query, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own = query * tl.num_programs(1) + head
    at_l, at_r = tl.arange(0, WIDE), tl.arange(0, TURNED)
    q_l = tl.load(absorbed + own * wide + at_l, mask=at_l < wide, other=0.0)
    q_r = tl.load(turned + own * narrow + at_r, mask=at_r < narrow, other=0.0)
    top = tl.load(sinks + head)
    total = tl.where(top == float("-inf"), 0.0, 1.0)
    mixed = tl.zeros((WIDE,), tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        row = tl.load(rows + query * count + at, mask=at < count, other=-1)
        seen = row >= 0
        from_l = latent + row[:, None] * wide + at_l[None, :]
        from_r = rope + row[:, None] * narrow + at_r[None, :]
        keys_l = tl.load(from_l, mask=seen[:, None] & (at_l < wide)[None, :], other=0.0).to(tl.float32)
        keys_r = tl.load(from_r, mask=seen[:, None] & (at_r < narrow)[None, :], other=0.0).to(tl.float32)
        score = (tl.sum(keys_l * q_l[None, :], axis=1) + tl.sum(keys_r * q_r[None, :], axis=1)) * scale
        score = tl.where(seen, score, float("-inf"))
        highest = tl.maximum(top, tl.max(score, axis=0))
        kept = tl.where(top == float("-inf"), 0.0, tl.exp(top - highest))
        p = tl.where(seen, tl.exp(score - highest), 0.0)
        total = total * kept + tl.sum(p, axis=0)
        mixed = mixed * kept + tl.sum(p[:, None] * keys_l, axis=0)
        top = highest
    tl.store(out + own * wide + at_l, mixed / tl.maximum(total, 1e-30), mask=at_l < wide)
