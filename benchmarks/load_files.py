"""A random Llama on disk in several formats, of any size, to be loaded. Knows layouts; times nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HIDDEN, INNER, HEADS, VOCABULARY = 2048, 5504, 16, 1024
FORMATS = ("bf16", "fp8", "mxfp4")
_LINEAR = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
_BYTES = {"bf16": 2.0, "fp8": 1.0, "mxfp4": 0.53125}
_QUANTISATION: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"},
    "mxfp4": {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True},
            }
        },
        "ignore": ["lm_head"],
    },
}


def write(folder: Path, name: str, nbytes: int) -> int:
    """Write a checkpoint of about `nbytes` in two files; return how many bytes they are."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    each = sum(rows * columns for rows, columns in _LINEAR.values()) * _BYTES[name]
    layers = max(2, round(nbytes / each))
    draw, where = torch.Generator().manual_seed(0), dict[str, str]()
    for part in range(2):
        tensors = dict(_outside(draw)) if part == 0 else {}
        for layer in range(layers * part // 2, layers * (part + 1) // 2):
            tensors |= dict(_layer(f"model.layers.{layer}", name, draw))
        file = f"model-{part + 1:05d}-of-00002.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
        del tensors
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(_config(name, layers)))
    return total


def remove(folder: Path) -> None:
    """Remove a checkpoint."""
    shutil.rmtree(folder)


def _config(name: str, layers: int) -> dict[str, Any]:
    quantisation = {"quantization_config": _QUANTISATION[name]} if name in _QUANTISATION else {}
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "vocab_size": VOCABULARY, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", **quantisation,
    }  # fmt: skip


def _outside(draw: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        yield name, _normal(VOCABULARY, HIDDEN, draw).bfloat16()
    yield "model.norm.weight", torch.ones(HIDDEN, dtype=torch.bfloat16)


def _layer(at: str, name: str, draw: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{at}.{norm}.weight", torch.ones(HIDDEN, dtype=torch.bfloat16)
    for linear, (rows, columns) in _LINEAR.items():
        if name == "bf16":
            yield f"{at}.{linear}.weight", _normal(rows, columns, draw).bfloat16()
        elif name == "fp8":
            codes, grid = fp8(rows, columns, draw)
            yield f"{at}.{linear}.weight", codes
            yield f"{at}.{linear}.weight_scale_inv", grid
        else:
            packed, scale = mxfp4(rows, columns, draw)
            yield f"{at}.{linear}.weight_packed", packed
            yield f"{at}.{linear}.weight_scale", scale


def _normal(rows: int, columns: int, draw: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=draw).mul_(0.02)


def fp8(rows: int, columns: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return codes [rows, columns] and a grid of scales for blocks of 128x128."""
    codes = torch.randn(rows, columns, generator=draw).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    grid = torch.rand(-(-rows // 128), -(-columns // 128), generator=draw).mul_(2e-5).add_(2e-4)
    return codes, grid


def mxfp4(rows: int, columns: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return packed codes [rows, columns / 2] and scale bytes [rows, columns / 32]."""
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=draw)
    scale = torch.randint(118, 120, (rows, columns // 32), dtype=torch.uint8, generator=draw)
    return packed, scale
