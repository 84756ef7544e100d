"""Plan what a request keeps: keys and values, latents, windows, states. Knows configurations and names; no content.

Read by structure: which layers hold a recurrent state is told by their tensors, sizes by the usual keys. A size that no
key gives is said to be unknown, never taken as 0.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.checkpoint.container import Checkpoint
from harness.checkpoint.expected import LAYERS
from harness.checkpoint.names import families, number, text_config
from harness.checkpoint.parts import text_stack

CACHE_BYTES, STATE_BYTES = 2, 4
"""A cache in bfloat16, a recurrent state in float32."""
_RECURRENT = re.compile(r"(^|\.)(A_log|dt_bias|D|x_proj|time_decay|conv1d|q_conv1d|ssm\w*)(\.|$)")
_KEYS = re.compile(r"(^|[._])(k_proj|kv\w*|wk|key|qkv\w*|query_key_value|c_attn|Wqkv|W_pack|attention|attn)(\.|$)")
_WINDOW = re.compile(r"sliding|swa|local|chunk|window")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """What one layer keeps of a request. `heads` are cut over tensor parallel ranks; 0: every rank holds all of it."""

    kind: str
    bytes_per_token: int = 0
    window: int = 0
    state_bytes: int = 0
    heads: int = 0

    def bytes(self, tokens: int, *, tp: int = 1) -> int:
        """Return the bytes of a request of so many tokens on one of `tp` ranks."""
        kept = min(tokens, self.window) if self.window else tokens
        if not self.heads:
            return self.bytes_per_token * kept + self.state_bytes
        share = -(-self.heads // min(tp, self.heads))
        return self.bytes_per_token // self.heads * share * kept + -(-self.state_bytes * share // self.heads)


def layer_caches(checkpoint: Checkpoint) -> tuple[list[LayerCache], list[str]]:
    """Return what each layer of the text stack keeps, and what is not known."""
    config, unknown = text_config(checkpoint.config), list[str]()
    leaves = _leaves(checkpoint)
    n = number(config, *LAYERS)
    count = n if n is not None and n <= 100_000 else (max(leaves) + 1 if leaves else 0)
    found = []
    for layer in range(count):
        here = leaves.get(layer, set())
        if any(_RECURRENT.search(leaf) for leaf in here):
            found.append(_state(config, unknown))
        elif not here or any(_KEYS.search(leaf) for leaf in here):
            found.append(_attention(config, layer, any("indexer" in leaf for leaf in here), unknown))
        else:
            found.append(LayerCache(kind="none"))
    return found, list(dict.fromkeys(unknown))


def _leaves(checkpoint: Checkpoint) -> dict[int, set[str]]:
    stack, found = text_stack(checkpoint), defaultdict[int, set[str]](set)
    for family in families(checkpoint):
        if stack and family.stack == stack and family.template.count("#") == 1:
            for numbers in family.members:
                found[numbers[0]].add(family.leaf)
    return found


def _attention(config: Mapping[str, Any], layer: int, indexer: bool, unknown: list[str]) -> LayerCache:
    latent = number(config, "kv_lora_rank")
    index = (number(config, "index_head_dim", "indexer_head_dim") or 0) * CACHE_BYTES if indexer else 0
    if indexer and not index:
        unknown.append("the size of an indexer key (index_head_dim)")
    window = _window(config, layer)
    if latent:
        rope = number(config, "qk_rope_head_dim") or 0
        return LayerCache(
            kind="latent + indexer" if index else "latent", bytes_per_token=(latent + rope) * CACHE_BYTES + index,
            window=window,
        )  # fmt: skip
    heads = number(config, "num_attention_heads", "n_head", "num_heads", "n_heads")
    kv = number(config, "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
    kv = 1 if config.get("multi_query") is True else kv or heads
    hidden = number(config, "hidden_size", "n_embd", "d_model", "dim")
    dim = number(config, "head_dim", "d_head", "d_kv", "kv_channels") or (hidden // heads if hidden and heads else None)
    if not kv or not dim:
        unknown.append("heads and head size of attention")
        return LayerCache(kind="unknown")
    value = number(config, "v_head_dim") or dim
    kind = f"window of {window}" if window else "full"
    return LayerCache(
        kind=kind, bytes_per_token=kv * (dim + value) * CACHE_BYTES + index, window=window, heads=0 if index else kv
    )


def _window(config: Mapping[str, Any], layer: int) -> int:
    """Return the window of a layer's attention, 0 where it sees everything."""
    window = number(
        config, "sliding_window", "sliding_window_size", "attention_window_size", "window_size", "attention_chunk_size"
    )
    kinds = config.get("layer_types")
    if not window or config.get("use_sliding_window") is False:
        return 0
    if isinstance(kinds, list) and layer < len(kinds):
        return window if isinstance(kinds[layer], str) and _WINDOW.search(kinds[layer]) else 0
    pattern = number(config, "sliding_window_pattern")
    if pattern:
        return 0 if (layer + 1) % pattern == 0 else window
    first = number(config, "max_window_layers")
    return window if first is None or layer >= first else 0


def _state(config: Mapping[str, Any], unknown: list[str]) -> LayerCache:
    """Return the state of a recurrent layer: gated delta rules, state spaces."""
    heads = number(config, "linear_num_value_heads")
    if heads:
        key, value = number(config, "linear_key_head_dim") or 0, number(config, "linear_value_head_dim") or 0
        keys = (number(config, "linear_num_key_heads") or heads) * key
        taps = max(0, (number(config, "linear_conv_kernel_dim") or 1) - 1)
        size = heads * key * value * STATE_BYTES + taps * (2 * keys + heads * value) * CACHE_BYTES
        return LayerCache(kind="recurrent", state_bytes=size, heads=heads)
    inner, names = config.get("linear_attn_config"), ("num_heads", "head_dim", "short_conv_kernel_size")
    if not isinstance(inner, dict):
        inner, names = config, ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    if heads := number(inner, names[0]):
        dim, taps = number(inner, names[1]) or 0, max(0, (number(inner, names[2]) or 1) - 1)
        size = heads * dim * dim * STATE_BYTES + taps * 3 * heads * dim * CACHE_BYTES
        return LayerCache(kind="recurrent", state_bytes=size, heads=heads)
    width = number(config, "mamba_d_ssm", "mamba_intermediate_size", "intermediate_size_mamba")
    groups = number(config, "mamba_num_heads", "mamba_n_heads") or 0
    width = width or groups * (number(config, "mamba_head_dim", "mamba_d_head") or 0)
    hidden, expand = number(config, "hidden_size", "d_model") or 0, number(config, "mamba_expand", "expand") or 2
    width, depth = width or hidden * expand, number(config, "mamba_d_state", "ssm_state_size", "state_size")
    if not width or not depth:
        unknown.append("the state of recurrent layers")
        return LayerCache(kind="unknown")
    taps = max(0, (number(config, "mamba_d_conv", "conv_kernel") or 1) - 1)
    return LayerCache(
        kind="recurrent", state_bytes=width * depth * STATE_BYTES + taps * width * CACHE_BYTES, heads=groups
    )
