"""Pages and states for the layers that a place holds. Knows configuration and places; must not know steps."""

from __future__ import annotations

import torch

from accel_impl.cache import PagedCache
from accel_impl.config import Config
from accel_impl.parallel import Place
from accel_impl.states import StateCache
from accel_impl.store import Memory


def memory_of(
    config: Config, place: Place, *, pages: int, slots: int, dtype: torch.dtype, device: torch.device
) -> Memory:
    """Make what requests keep: keys of sparse layers and of the one for one more token, states of recurrent ones."""
    here = place.layers(config.num_hidden_layers)
    keyed = [n for n in here if not config.is_recurrent(n)]
    if place.last and config.further is not None:
        keyed.append(config.further)
    widths = {"latent": config.kv_lora_rank, "rope": config.qk_rope_head_dim, "index": config.index_head_dim}
    heads, width = len(place.cut(config.linear_num_heads)), config.linear_head_dim
    return Memory(
        PagedCache(
            layers=keyed, widths=widths, pages=pages, page_tokens=config.page_tokens, slots=slots, dtype=dtype,
            device=device,
        ),
        StateCache(
            layers=[n for n in here if config.is_recurrent(n)], memory=(heads, width, width),
            inputs=(config.linear_conv_kernel_dim - 1, 3 * heads * width), features=config.hidden_size, slots=slots,
            dtype=dtype, device=device,
        ),
    )  # fmt: skip
