"""One writer for each stored format: a small model, encoded, sharded, under the configuration that its exporter writes.

Knows skeletons and encodings; nothing of the reader. `FORMATS` holds them by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from harness.faults.disk import encode, skeletons
from harness.faults.disk.encode import Encoded
from harness.faults.disk.files import Coded, Files, Stored, Values
from harness.faults.disk.skeletons import Skeleton, Tensor

SHARDS = 4
Encoder = Callable[[Values], Encoded]
_SIZES = {"gate_proj": 0.8, "w1": 0.8, "o_proj": 0.7, "down_proj": 0.7, "w2": 0.7, "k_proj": 1.2}
"""How large the matrices of a kind are beside others: trained ones differ too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a model is stored: what its linear layers and its experts are encoded with (None: plainly, in `plain`)."""

    skeleton: Callable[[], Skeleton]
    plain: str = "BF16"
    linear: Encoder | None = None
    expert: Encoder | None = None
    quantisation: Mapping[str, Any] | None = None
    beside: Mapping[str, Any] = field(default_factory=dict)


def write(name: str, seed: int = 0) -> Files:
    """Return the checkpoint of a format, whole and right."""
    form = FORMATS[name]
    skeleton = form.skeleton()
    draw = np.random.default_rng(seed)
    files = Files(format=name, config=dict(skeleton.config), shards={}, weights={})
    files.config["torch_dtype"] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[form.plain]
    if form.quantisation is not None:
        files.config["quantization_config"] = dict(form.quantisation)
    files.beside = {file: json.dumps(content, indent=1).encode() for file, content in form.beside.items()}
    patterns: dict[str, Values] = {}
    tensors: list[tuple[str, Stored]] = []
    for tensor in skeleton.tensors:
        coded, parts = _encoded(form, tensor, _values(tensor, draw, patterns))
        files.weights[coded.name] = coded
        tensors += parts
    _shard(files, tensors)
    return files


def _values(tensor: Tensor, draw: np.random.Generator, patterns: dict[str, Values]) -> Values:
    """Return values as a trained model has them: rows of a matrix share which columns are large."""
    noise = draw.standard_normal(tensor.shape)
    if tensor.kind == "norm":
        return (1 + 0.2 * noise).astype(np.float32)
    if tensor.kind in ("bias", "sinks"):
        return (0.1 * noise).astype(np.float32)
    if tensor.kind == "kept":
        return (7 + 0.25 * noise).astype(np.float32)
    layer = next((p for p in tensor.name.split(".") if p.isdecimal()), "")
    leaf = tensor.name.removesuffix(".weight").rsplit(".", 1)[-1]
    columns = patterns.setdefault(
        f"{layer} {tensor.shape[-1]}", np.exp(0.4 * draw.standard_normal(tensor.shape[-1])).astype(np.float32)
    )
    rows = np.exp(0.3 * draw.standard_normal((*tensor.shape[:-1], 1)))
    size = 1.0 if tensor.kind in ("embedding", "head") else _SIZES.get(leaf, 1.0)
    found = noise * rows * columns
    even = np.sqrt((found**2).mean(axis=(-2, -1), keepdims=True))  # sizes change smoothly from layer to layer
    sized: Values = (found * size / even / tensor.shape[-1] ** 0.5).astype(np.float32)
    return sized


def _encoded(form: Format, tensor: Tensor, values: Values) -> tuple[Coded, list[tuple[str, Stored]]]:
    encoder = {"linear": form.linear, "expert": form.expert}.get(tensor.kind)
    module = tensor.name.removesuffix("weight") if tensor.name.endswith(".weight") else tensor.name
    if encoder is None:
        dtype = "F32" if tensor.kind == "kept" else form.plain
        kept, truth = encode.plain(values, dtype)
        return Coded(name=tensor.name, kind=tensor.kind, parts={"weight": tensor.name}, truth=truth), [
            (tensor.name, kept)
        ]
    parts, truth = encoder(values)
    names = {role: module + suffix for role, (suffix, _) in parts.items()}
    coded = Coded(name=tensor.name, kind=tensor.kind, parts=names, truth=truth)
    return coded, [(names[role], value) for role, (_, value) in parts.items()]


def _shard(files: Files, tensors: list[tuple[str, Stored]]) -> None:
    """Fill the shards in order of names, each up to its share of the bytes."""
    ordered = sorted(tensors)
    share = sum(len(t.data) for _, t in ordered) / SHARDS
    done = 0
    for name, tensor in ordered:
        number = min(SHARDS, int(done / share) + 1)
        files.shards.setdefault(f"model-{number:05d}-of-{SHARDS:05d}.safetensors", {})[name] = tensor
        done += len(tensor.data)


# --- what exporters write into config.json ---


def _compressed(form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "symmetric": True, **weights},
             "input_activations": inputs, "output_activations": None}  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"], "kv_cache_scheme": None, "quantization_status": "compressed",
        "version": "0.12.2",
    }  # fmt: skip


def _fp8(**more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", **more}


_BLOCK = {"weight_block_size": [128, 128]}
_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
_QUARK = {
    "quant_method": "quark", "quant_mode": "eager_mode", "exclude": ["lm_head", "*mlp.gate"], "layer_quant_config": {},
    "layer_type_quant_config": {},
}  # fmt: skip
_GPT_OSS_KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def _quark(dtype: str, scheme: str, **more: Any) -> dict[str, Any]:
    weight = {"dtype": dtype, "qscheme": scheme, "is_dynamic": False, "symmetric": None, **more}
    return {**_QUARK, "global_quant_config": {"weight": weight, "input_tensors": None, "output_tensors": None}}


def _gptq(form: str) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False, "lm_head": False,
        "checkpoint_format": form, "true_sequential": True,
    }  # fmt: skip


_MODELOPT = {"producer": {"name": "modelopt", "version": "0.39.0"},
             "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16,
                              "exclude_modules": ["lm_head", "model.layers.*.mlp.gate"]}}  # fmt: skip
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
_NVFLOAT4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


def _both(encoder: Encoder, **more: Any) -> Format:
    more.setdefault("skeleton", skeletons.qwen3_moe)
    return Format(linear=encoder, expert=encoder, **more)


FORMATS: dict[str, Format] = {
    "bf16": Format(skeleton=skeletons.qwen3_moe),
    "f16": Format(skeleton=skeletons.llama, plain="F16"),
    "f32": Format(skeleton=skeletons.llama, plain="F32"),
    "fp8_block": _both(encode.fp8_block, skeleton=skeletons.deepseek_v32, quantisation=_fp8(**_BLOCK)),
    "fp8_block_scale": _both(partial(encode.fp8_block, suffix="scale"), quantisation=_fp8(**_BLOCK)),
    "fp8_qscale": _both(
        partial(encode.fp8_tensor, scale_name="qscale_weight", input_name="qscale_act"),
        quantisation=_fp8(activation_scheme="static"), skeleton=skeletons.llama,
    ),
    "fp8_tensor": _both(
        encode.fp8_tensor, skeleton=skeletons.llama,
        quantisation=_compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"},
                                 {**_TOKEN, "strategy": "tensor", "dynamic": False}),
    ),
    "fp8_channel": _both(
        encode.fp8_rows,
        quantisation=_compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, _TOKEN),
    ),
    "fp8_e5m2": _both(partial(encode.fp8_tensor, dtype="F8_E5M2"), quantisation=_quark("fp8_e5m2", "per_tensor")),
    "fp8_fnuz": _both(
        partial(encode.fp8_block, dtype="F8_E4M3FNUZ"),
        quantisation={"quant_method": "fp8", "fmt": "e4m3fnuz", **_BLOCK},
    ),
    "mxfp8": _both(
        encode.mxfp8,
        quantisation=_compressed(
            "mxfp8-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
        ),
    ),
    "mxfp4_gpt_oss": Format(
        skeleton=skeletons.gpt_oss, expert=encode.mxfp4_blocks,
        quantisation={"quant_method": "mxfp4", "modules_to_not_convert": _GPT_OSS_KEPT},
    ),
    "mxfp4_packed": _both(encode.mxfp4, quantisation=_compressed("mxfp4-pack-quantized", _FLOAT4)),
    "mxfp4_quark": _both(
        partial(encode.mxfp4, names=("weight", "weight_scale")),
        quantisation=_quark("fp4", "per_group", group_size=32, scale_format="e8m0"),
    ),
    "fp4_deepseek_v4": Format(
        skeleton=skeletons.deepseek_v4, linear=encode.fp8_power,
        expert=partial(encode.mxfp4, names=("weight", "scale"), dtypes=("I8", "F8_E8M0")),
        quantisation=_fp8(scale_fmt="ue8m0", **_BLOCK),
    ),
    "nvfp4_modelopt": _both(
        partial(encode.nvfp4, divisor=False),
        quantisation={"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
                      "ignore": ["lm_head", "model.layers.*.mlp.gate"]},
        beside={"hf_quant_config.json": _MODELOPT},
    ),
    "nvfp4_packed": _both(
        partial(encode.nvfp4, divisor=True), quantisation=_compressed("nvfp4-pack-quantized", _NVFLOAT4)
    ),
    "int4_packed": _both(encode.int4, quantisation=_compressed("pack-quantized", _INT4)),
    "gptq_v1": _both(partial(encode.gptq, v1=True), plain="F16", skeleton=skeletons.llama, quantisation=_gptq("gptq")),
    "gptq_v2": _both(
        partial(encode.gptq, v1=False), plain="F16", skeleton=skeletons.llama, quantisation=_gptq("gptq_v2")
    ),
    "awq": _both(
        encode.awq, plain="F16", skeleton=skeletons.llama,
        quantisation={"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
                      "modules_to_not_convert": None},
    ),
}  # fmt: skip
