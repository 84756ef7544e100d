"""The recipe of the vision tower: configuration and tensors. Knows names and sizes; must not know the decoder."""

from __future__ import annotations

from typing import Any

from reference_impl.drawing import Drawing

QK_GAIN, PATCH_GAIN, ROW_GAIN = 1.4, 0.3, 1.4
"""Gains over N(0, 1/fan_in): of queries and keys, of the first convolution (neighbouring pixels are alike), of rows."""

VISION: dict[str, Any] = {
    "patch_size": 8,
    "spatial_merge_size": 2,
    "depth": 3,
    "hidden_size": 48,
    "num_heads": 3,
    "intermediate_size": 112,
    "pos_embed_grid": [6, 5],
    "deepstack_visual_indexes": [0, 1],
    "min_pixels": 512,
    "max_pixels": 8192,
    "rope_theta": 10000.0,
    "mean": [0.48, 0.46, 0.41],
    "std": [0.27, 0.26, 0.28],
    "layer_norm_eps": 1e-6,
}


def add_vision(d: Drawing, text: int) -> None:
    """Draw the tower's tensors, for a decoder of width `text`."""
    v = VISION
    hidden, inner, merged = v["hidden_size"], v["intermediate_size"], v["hidden_size"] * v["spatial_merge_size"] ** 2
    patch, channels = v["patch_size"], 3
    kernel = d.matrix("visual.patch_embed", hidden, channels * patch**2, PATCH_GAIN)
    d.bf16("visual.patch_embed.weight", kernel.reshape(hidden, channels, patch, patch))
    d.bias("visual.patch_embed", hidden)
    d.bf16("visual.pos_embed", 0.7 * d.normal("visual.pos_embed", *v["pos_embed_grid"], hidden))
    for n in range(v["depth"]):
        block = f"visual.blocks.{n}"
        d.layer_norm(f"{block}.norm1", hidden)
        d.layer_norm(f"{block}.norm2", hidden)
        qkv = d.matrix(f"{block}.attn.qkv", 3 * hidden, hidden)
        qkv[: 2 * hidden] *= QK_GAIN
        d.bf16(f"{block}.attn.qkv.weight", qkv)
        d.bias(f"{block}.attn.qkv", 3 * hidden)
        d.linear(f"{block}.attn.proj", hidden, hidden)
        d.linear(f"{block}.mlp.fc1", inner, hidden)
        d.linear(f"{block}.mlp.fc2", hidden, inner)
    d.layer_norm("visual.norm", hidden)
    d.linear("visual.merger.fc1", merged, merged)
    d.linear("visual.merger.fc2", text, merged, ROW_GAIN)
    for j in range(len(v["deepstack_visual_indexes"])):
        d.layer_norm(f"visual.deepstack.{j}.norm", merged)
        d.linear(f"visual.deepstack.{j}.fc1", merged, merged)
        d.linear(f"visual.deepstack.{j}.fc2", text, merged)
