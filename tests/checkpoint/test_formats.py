"""Weights and their scales are found by names and dtypes, and what is missing is an error."""

from __future__ import annotations

import pytest
import torch
from checkpoint_files import write

from harness.checkpoint import checkpoint_facts, decode, format_problems, logical_tensors, open_checkpoint
from harness.errors import CheckpointError

BLOCK = {"quantization_config": {"weight_block_size": [2, 4]}}
GROUP = {"quantization_config": {"config_groups": {"group_0": {"weights": {"group_size": 8, "num_bits": 4}}}}}
ONES = torch.full((3, 32), 0x22, dtype=torch.uint8)  # codes of 1, 64 a row
CODES = torch.ones(5, 7).to(torch.float8_e4m3fn)
MIXED = torch.tensor([[127, 128], [126, 127], [129, 127]], dtype=torch.uint8)
E4M3_TWOS = torch.full((3, 4), 2.0).to(torch.float8_e4m3fn)


def _word(code: int) -> torch.Tensor:
    value = code * 0x11111111
    return torch.tensor([value - 2**32 if value >= 2**31 else value], dtype=torch.int32)


def _gptq(zero: int) -> dict[str, torch.Tensor]:
    """Sixteen inputs in two groups, given in another order; all codes are 9."""
    return {
        "l.q.qweight": _word(9).expand(2, 8).contiguous(),
        "l.q.qzeros": _word(zero).expand(2, 1).contiguous(),
        "l.q.scales": torch.tensor([[1.0], [2.0]]).expand(2, 8).contiguous(),
        "l.q.g_idx": torch.tensor([0, 1] * 8, dtype=torch.int32),
    }


_NINES = torch.tensor([9.0, 10.0] * 8).expand(8, 16)

FORMATS = {
    "fp8_block": (
        {"l.q.weight": CODES, "l.q.weight_scale_inv": torch.arange(6.0).reshape(3, 2)},
        BLOCK,
        torch.arange(6.0).reshape(3, 2).repeat_interleave(2, 0)[:5].repeat_interleave(4, 1)[:, :7],
    ),
    "fp8_block, other names": (
        {"l.q.scale": torch.full((3, 2), 128, dtype=torch.uint8).view(torch.float8_e8m0fnu), "l.q.weight": CODES},
        BLOCK,
        torch.full((5, 7), 2.0),
    ),
    "fp8_channel": (
        {"l.q.weight": CODES, "l.q.weight_scale": torch.arange(5.0).reshape(5, 1), "l.q.input_scale": torch.ones(1)},
        {},
        torch.arange(5.0).reshape(5, 1).expand(5, 7),
    ),
    "mxfp8": (
        {"l.q.weight": torch.ones(3, 40).to(torch.float8_e4m3fn), "l.q.weight_scale": MIXED},
        {},
        torch.pow(2.0, MIXED.float() - 127).repeat_interleave(32, 1)[:, :40],
    ),
    "mxfp4": (
        {"l.q.weight_packed": ONES, "l.q.weight_scale": MIXED},
        {},
        torch.pow(2.0, MIXED.float() - 127).repeat_interleave(32, 1),
    ),
    "mxfp4, signed bytes": (
        {"l.q.weight": ONES.view(torch.int8), "l.q.scale": MIXED.view(torch.float8_e8m0fnu)},
        {"expert_dtype": "fp4"},
        torch.pow(2.0, MIXED.float() - 127).repeat_interleave(32, 1),
    ),
    "mxfp4_blocks": (
        {
            "l.x.gate_up_proj_blocks": ONES.reshape(1, 3, 2, 16),
            "l.x.gate_up_proj_scales": MIXED.reshape(1, 3, 2),
        },
        {},
        torch.pow(2.0, MIXED.float() - 127).repeat_interleave(32, 1).reshape(1, 3, 64),
    ),
    "nvfp4_multiplier": (
        {"l.q.weight": ONES, "l.q.weight_scale": E4M3_TWOS, "l.q.weight_scale_2": torch.tensor(0.25)},
        {},
        torch.full((3, 64), 0.5),
    ),
    "nvfp4_divisor": (
        {"l.q.weight_packed": ONES, "l.q.weight_scale": E4M3_TWOS, "l.q.weight_global_scale": torch.tensor([0.25])},
        {},
        torch.full((3, 64), 8.0),
    ),
    "int4_packed": (
        {
            "l.q.weight_packed": torch.full((3, 3), 0x19999999, dtype=torch.int32),  # codes of 1, the eighth -7
            "l.q.weight_scale": torch.tensor([[1.0, 2.0, 3.0]] * 3),
            "l.q.weight_shape": torch.tensor([3, 18]),
        },
        GROUP,
        torch.tensor([[1.0] * 7 + [-7] + [2.0] * 7 + [-14] + [3.0] * 2] * 3),
    ),
    "gptq_v1": (_gptq(7), {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 8}}, _NINES - 8),
    "gptq_v2": (
        _gptq(8),
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 8, "checkpoint_format": "gptq_v2"}},
        _NINES - 8,
    ),
    "gptq_v1, in order": (
        {n: t for n, t in _gptq(7).items() if "g_idx" not in n},
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 8}},
        torch.tensor([1.0, 2.0]).repeat_interleave(8).expand(8, 16),
    ),
    "awq": (
        {
            "l.q.qweight": _word(9).expand(12, 2).contiguous(),
            "l.q.qzeros": _word(8).expand(3, 2).contiguous(),
            "l.q.scales": torch.arange(1.0, 4.0).reshape(3, 1).expand(3, 16).contiguous(),
        },
        {"quantization_config": {"quant_method": "awq", "w_bit": 4, "q_group_size": 5}},
        torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(5)[:12].expand(16, 12),
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_found_and_decoded(tmp_path, name):
    """A weight is found with its scales wherever they lie, and its values are those worked out by hand."""
    tensors, config, expected = FORMATS[name]
    shards = [{n: t} for n, t in tensors.items()]  # each part in a shard of its own
    checkpoint = open_checkpoint(write(tmp_path, *shards, {"l.norm.weight": torch.ones(4)}, config=config))
    found = {x.name: x for x in logical_tensors(checkpoint)}
    assert set(found) == {"l.norm.weight", next(n for n in found if n != "l.norm.weight")}
    weight = next(x for n, x in found.items() if n != "l.norm.weight")
    assert weight.format == name.split(",")[0]
    assert weight.name == ("l.x.gate_up_proj" if "blocks" in name else "l.q.weight")
    assert weight.shape == expected.shape
    assert torch.equal(decode(checkpoint, weight), expected)
    assert format_problems(checkpoint) == []


SCALES = [
    (n, part)
    for n, (tensors, _, _) in FORMATS.items()
    for part in tensors
    if part.rsplit(".", 1)[-1] not in ("weight", "weight_packed", "input_scale", "qweight", "g_idx")
    and not part.endswith("_blocks")
]


@pytest.mark.parametrize(("name", "part"), SCALES)
def test_a_missing_scale_is_an_error(tmp_path, name, part):
    """Without any one of its scales a weight does not decode; it is never taken as if the scale were 1."""
    tensors, config, _ = FORMATS[name]
    left = {n: t for n, t in tensors.items() if n != part}
    checkpoint = open_checkpoint(write(tmp_path, left, config=config))
    refused = [x for x in logical_tensors(checkpoint) if x.problem]
    assert refused
    assert len(format_problems(checkpoint)) == len(refused)
    for logical in refused:
        with pytest.raises(CheckpointError):
            decode(checkpoint, logical)
    assert checkpoint_facts(tmp_path)["undecodable"]


def test_the_block_size_comes_from_the_configuration(tmp_path):
    """576 rows are four and a half blocks of 128: rows // grid would be 115."""
    scale = torch.arange(1.0, 11.0).reshape(5, 2)
    tensors = {"q.weight": torch.ones(576, 130).to(torch.float8_e4m3fn), "q.weight_scale_inv": scale}
    config = {"text_config": {"quantization_config": {"weight_block_size": [128, 128]}}}
    checkpoint = open_checkpoint(write(tmp_path / "a", tensors, config=config))
    value = decode(checkpoint, logical_tensors(checkpoint)[0])
    assert value[127, 127] == 1
    assert value[128, 127] == 3
    assert value[575, 129] == 10
    without = open_checkpoint(write(tmp_path / "b", tensors))
    assert "weight_block_size" in format_problems(without)[0].found


def test_a_transposed_grid_is_found_from_headers(tmp_path):
    """A grid of scales in the wrong orientation is a problem before anything is read."""
    tensors = {"q.weight": CODES, "q.weight_scale_inv": torch.ones(2, 3)}
    problems = format_problems(open_checkpoint(write(tmp_path, tensors, config=BLOCK)))
    assert [p.name for p in problems] == ["q.weight"]
    assert "[2, 3]" in problems[0].found


def test_what_does_not_fit_is_told_with_what_would(tmp_path):
    """A grid, or a number of groups, that the configuration does not give is refused with the sizes that it fits."""
    grid = {"q.weight": torch.ones(160, 96).to(torch.float8_e4m3fn), "q.weight_scale_inv": torch.ones(3, 2)}
    wrong = {"quantization_config": {"weight_block_size": [128, 128]}}
    assert (
        "it fits blocks of 64x64"
        in format_problems(open_checkpoint(write(tmp_path / "a", grid, config=wrong)))[0].found
    )
    groups = {**_gptq(7)}
    del groups["l.q.g_idx"]
    wrong = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 16}}
    found = format_problems(open_checkpoint(write(tmp_path / "b", groups, config=wrong)))[0].found
    assert "2 groups of scales where groups of 16 need 1" in found


def test_three_bits_are_refused(tmp_path):
    """GPTQ of three bits, whose fields cross words, is named and not guessed."""
    tensors = {**_gptq(7), "l.q.qweight": _word(9).expand(3, 8).contiguous(), "l.q.g_idx": torch.zeros(32).int()}
    found = format_problems(open_checkpoint(write(tmp_path, tensors, config={})))[0].found
    assert "3 bits" in found


def test_orphans_are_problems(tmp_path):
    """A scale without its weight, and FP8 bytes without any scale, are named."""
    tensors = {"a.weight_scale_inv": torch.ones(1, 1), "b.weight": CODES, "c.qweight": torch.ones(2, 2).int()}
    problems = format_problems(open_checkpoint(write(tmp_path, tensors, config=BLOCK)))
    assert sorted(p.name for p in problems) == ["a.weight_scale_inv", "b.weight", "c.weight"]


def test_plain_tensors_stay_plain(tmp_path):
    """Floats are widened, integers keep their type, and a parameter called scale is a parameter."""
    tensors = {
        "hc.scale": torch.tensor([1.5, 2.5]),
        "norm.weight": torch.tensor([1.0, 2.0]).to(torch.bfloat16),
        "table": torch.tensor([3, 4]),
    }
    checkpoint = open_checkpoint(write(tmp_path, tensors))
    values = {x.name: decode(checkpoint, x) for x in logical_tensors(checkpoint)}
    assert values["hc.scale"].tolist() == [1.5, 2.5]
    assert values["norm.weight"].dtype == torch.float32
    assert values["table"].dtype == torch.int64
    assert format_problems(checkpoint) == []
