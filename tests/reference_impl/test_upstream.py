"""Parts of the reference against the module of the same kind in transformers, with the same weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.adapter import silent
from reference_impl import experts, indexer, layers, sparse
from reference_impl.config import Config, read_config
from reference_impl.recurrent import recurrent_attention
from reference_impl.request import Cache, Call
from reference_impl.vision import tower

pytest.importorskip("transformers")
T = 29


@pytest.fixture(scope="module")
def config(checkpoint) -> Config:
    return read_config(checkpoint)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(1, T, 160, generator=torch.Generator().manual_seed(2))


def call(record: Any = silent) -> Call:
    return Call(positions_BT=torch.arange(T)[None], start=0, length_tokens=T, cache=Cache(), record=record)


def fill(module: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """Give a module weights by its own names; each must be there, and none be left over."""
    shapes = {k: v.shape for k, v in module.state_dict().items()}
    assert {k: v.numel() for k, v in weights.items()} == {k: s.numel() for k, s in shapes.items()}
    module.load_state_dict({k: v.view(shapes[k]) for k, v in weights.items()})
    return module.eval()


def close(actual: Tensor, expected: Tensor) -> bool:
    return float((actual - expected).norm() / expected.norm()) < 3e-6


def test_recurrent_attention_is_kimi_linear_s(port, config, x):
    """The layer gives what kimi_linear's delta attention gives (its chunked form), the convolution included."""
    from transformers import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    own = port._loaded.part("model.layers.2.linear_attn")
    theirs = KimiLinearConfig(
        hidden_size=160, num_hidden_layers=1, num_attention_heads=5, linear_num_heads=5, linear_head_dim=24,
        linear_conv_kernel_dim=4, rms_norm_eps=1e-5, hidden_act="silu", layer_types=["linear_attention"],
    )  # fmt: skip
    gate = ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log")
    named = {f"forget_gate.{k}" if k in gate else k: v for k, v in own.items()}
    module = fill(KimiLinearDeltaAttention(theirs, 0), named)
    with torch.no_grad():
        expected = module(x)
        assert close(recurrent_attention(config, own, "layers.2.attn", x, call()), expected)


def test_routing_is_deepseek_s(port, config, x):
    """Experts, weights and groups are those of deepseek_v32's router."""
    from transformers import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32TopkRouter

    own = port._loaded.part("model.layers.3.mlp")
    theirs = DeepseekV32Config(
        hidden_size=160, n_routed_experts=12, num_experts_per_tok=3, n_group=3, topk_group=2, norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )  # fmt: skip
    names = {"gate.weight": "weight", "gate.e_score_correction_bias": "e_score_correction_bias"}
    router = fill(DeepseekV32TopkRouter(theirs), {names[k]: v for k, v in own.items() if k in names})
    with torch.no_grad():
        _, weights, chosen = router(x)
    found, found_weights = experts.route(config, own, "router", x, silent)
    order = chosen.sort(-1)
    assert torch.equal(found[0], order.values)
    assert close(found_weights[0], weights.gather(-1, order.indices))


def test_choices_are_those_of_deepseek_s_indexer(port, config, x):
    """With a window of none but the query itself, the keys are those that deepseek_v32's indexer takes."""
    from transformers import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

    own = port._loaded.part("model.layers.3.self_attn")
    theirs = DeepseekV32Config(
        hidden_size=160, q_lora_rank=48, index_n_heads=16, index_head_dim=32, index_topk=8, qk_rope_head_dim=16
    )
    named = {k.removeprefix("indexer."): v for k, v in own.items() if k.startswith("indexer.")}
    module = fill(DeepseekV32Indexer(theirs, 0), named)
    q_a = torch.randn(1, T, 48, generator=torch.Generator().manual_seed(3))
    angles = layers.rotary_angles(torch.arange(T)[None], layers.yarn_frequencies(16, config.rope)).repeat(1, 1, 2)
    before = torch.ones(T, T, dtype=torch.bool).tril(-5)[None]
    expected = module(x, q_a, (angles.cos().float(), angles.sin().float()), before, torch.arange(T)[None])
    found = indexer.select_keys(config, own, "indexer", 3, x, q_a, call())
    for t in range(T):
        keys = {int(k) for k in expected[0, t] if before[0, t, k]}
        assert {int(k) for k in found[0, t]} - {-1} == keys


def test_mixes_are_inkling_s_block_residual(port, x):
    """A mix is inkling2's attention over the ends of blocks and the running sum."""
    from transformers import Inkling2TextConfig
    from transformers.models.inkling2.modeling_inkling2 import Inkling2BlockAttentionResidual

    theirs = Inkling2TextConfig(hidden_size=160, attn_implementation="eager")
    query = port._loaded.weights["model.layers.4.mlp_res.query"]
    module = fill(Inkling2BlockAttentionResidual(theirs), {"query": query})
    module.norm.eps = 1e-5
    streams = [x * 3, x.flip(1), x.roll(7, 2) * 0.1]
    with torch.no_grad():
        expected = module(torch.stack(streams[:2], dim=-2), streams[2])[0]
    assert close(layers.mix(query, streams, 1e-5), expected)


def test_frequencies_and_scale_are_yarn_s(config):
    """Rotary frequencies and the factor on scores are those that transformers computes for a YaRN configuration."""
    from transformers import DeepseekV3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import yarn_get_mscale

    rope = config.rope
    theirs = DeepseekV3Config(
        qk_rope_head_dim=16, head_dim=16, max_position_embeddings=1048576,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": rope.rope_theta, "factor": rope.factor, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    )  # fmt: skip
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    assert torch.allclose(layers.yarn_frequencies(16, rope).float(), expected, rtol=1e-6)
    assert layers.score_scale(rope) == pytest.approx(yarn_get_mscale(256.0, 0.707))


def test_sinks_and_clamped_experts_are_gpt_oss_s(port, x):
    """Attention with sinks and the clamped activation are gpt_oss's."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, eager_attention_forward

    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, T, 5, 24, generator=generator) for _ in range(3))
    sinks = port._loaded.weights["model.layers.3.self_attn.sinks"]
    module = SimpleNamespace(num_key_value_groups=1, sinks=sinks, training=False)
    mask = torch.zeros(T, T).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
    heads = (a.transpose(1, 2) for a in (q, k, v))
    expected, _ = eager_attention_forward(module, *heads, mask, 0.3)
    assert close(sparse.attend(q, k, v, (mask == 0)[None], sinks, 0.3), expected)

    w = port._loaded.part("model.layers.3.mlp.experts.4")
    gate_up = torch.stack([4 * x[0] @ w["gate_proj.weight"].T, 4 * x[0] @ w["up_proj.weight"].T], dim=-1).flatten(-2)
    cut = GptOssExperts._apply_gate(SimpleNamespace(alpha=experts.ALPHA, limit=experts.LIMIT), gate_up)
    assert (gate_up.abs() > 7).any()
    assert close(experts.gated_clamped(w, 4 * x[0]), cut @ w["down_proj.weight"].T)


def test_the_tower_is_qwen_s(port, config):
    """Patches to rows, deepstack included, are qwen3_vl's tower's on two pictures, with a square table of positions."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    own = dict(port._loaded.part("visual"))
    own["pos_embed"] = torch.cat([own["pos_embed"], own["pos_embed"][:, :1].flip(0)], dim=1)  # 6 x 6
    theirs = Qwen3VLVisionConfig(
        depth=3, hidden_size=48, num_heads=3, intermediate_size=112, patch_size=8, temporal_patch_size=1,
        spatial_merge_size=2, out_hidden_size=160, num_position_embeddings=36, deepstack_visual_indexes=[0, 1],
        hidden_act="gelu_pytorch_tanh", attn_implementation="eager",
    )  # fmt: skip
    module = Qwen3VLVisionModel(theirs)
    module.interpolation_align_corners = False
    fill(module, {_qwen_name(k): v for k, v in own.items()})
    grid = torch.tensor([[1, 4, 6], [1, 10, 6]])
    pixels = torch.randn(84, 192, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = module(pixels, grid_thw=grid)
        rows, deepstack = tower(own, config.vision, pixels, grid, silent)
    assert close(rows, expected.pooler_output)
    for found, wanted in zip(deepstack, expected.deepstack_features, strict=True):
        assert close(found, wanted)


def _qwen_name(name: str) -> str:
    for own, theirs in (
        ("patch_embed.", "patch_embed.proj."), ("mlp.fc", "mlp.linear_fc"), ("deepstack.", "deepstack_merger_list."),
    ):  # fmt: skip
        name = name.replace(own, theirs)
    if name.startswith(("merger.fc", "deepstack_merger_list.")):
        name = name.replace(".fc", ".linear_fc")
    if name.startswith("norm."):
        name = f"merger.{name}"
    return f"{name}.weight" if name == "pos_embed" else name
