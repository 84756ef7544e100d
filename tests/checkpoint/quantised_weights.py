"""One small weight of each stored format, from random bytes. Knows layouts as files have them; imports no decoder."""

from __future__ import annotations

import torch

BLOCKS = {"quantization_config": {"weight_block_size": [128, 128], "quant_method": "fp8"}}
GROUPS = {"quantization_config": {"group_size": 32, "bits": 4}}


def weights(seed: int = 1) -> dict[str, tuple[dict[str, torch.Tensor], dict]]:
    """Return stored tensors and configuration by format."""
    draw = torch.Generator().manual_seed(seed)

    def scales(*shape):
        return torch.rand(*shape, generator=draw) + 0.1

    def exponents(*shape):
        return torch.randint(115, 131, shape, generator=draw).to(torch.uint8)

    def codes(*shape):
        return torch.randint(0, 256, shape, generator=draw).to(torch.uint8)

    def words(*shape):
        return torch.randint(-(2**31), 2**31 - 1, shape, generator=draw).to(torch.int32)

    def fp8(*shape):
        return torch.randn(*shape, generator=draw).to(torch.float8_e4m3fn)

    def local(*shape):
        return (8 * scales(*shape)).to(torch.float8_e4m3fn)

    gptq = {"x.qweight": words(12, 48), "x.qzeros": words(3, 6), "x.scales": scales(3, 48).half()}
    return {
        "fp8_block": ({"x.weight": fp8(320, 640), "x.weight_scale_inv": scales(3, 5)}, BLOCKS),
        "fp8_channel": ({"x.weight": fp8(40, 56), "x.weight_scale": scales(40, 1)}, {}),
        "mxfp4": ({"x.weight_packed": codes(40, 48), "x.weight_scale": exponents(40, 3)}, {}),
        "mxfp4_int8": ({"x.weight": codes(40, 48).view(torch.int8), "x.scale": exponents(40, 3)}, {}),
        "mxfp4_blocks": ({"x_blocks": codes(3, 10, 2, 16), "x_scales": exponents(3, 10, 2)}, {}),
        "nvfp4_multiplier": (
            {"x.weight": codes(40, 48), "x.weight_scale": local(40, 6), "x.weight_scale_2": torch.tensor(0.013)},
            {},
        ),
        "nvfp4_divisor": (
            {
                "x.weight_packed": codes(40, 48),
                "x.weight_scale": local(40, 6),
                "x.weight_global_scale": torch.tensor([77.0]),
            },
            {},
        ),
        "int4_packed": (
            {
                "x.weight_packed": words(40, 12),
                "x.weight_scale": scales(40, 3).bfloat16(),
                "x.weight_shape": torch.tensor([40, 96]),
            },
            GROUPS,
        ),
        "gptq_v1": ({**gptq, "x.g_idx": (torch.randperm(96, generator=draw) // 32).int()}, GROUPS),
        "awq": (
            {"x.qweight": words(96, 6), "x.qzeros": words(3, 6), "x.scales": scales(3, 48).half()},
            {"quantization_config": {**GROUPS["quantization_config"], "quant_method": "awq"}},
        ),
    }
