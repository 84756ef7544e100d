"""Where in the port each tap is computed: the weight it belongs to, the method, the operator. Knows names only."""

from __future__ import annotations

from accel_impl.config import Config

_LAYER = {
    "": "{w} in Model._layer",
    ".input_norm": "{w}.input_layernorm in Model._layer by ops.rms_norm",
    ".attn": "{w}.self_attn.o_proj in Model._attention by ops.linear",
    ".attn.q_a": "{w}.self_attn.q_a_proj in Model._attention by ops.linear",
    ".attn.q_norm": "{w}.self_attn.q_a_layernorm in Model._attention by ops.rms_norm",
    ".attn.q": "{w}.self_attn.q_b_proj in Model._attention by ops.linear, ops.rope",
    ".attn.kv_latent": "{w}.self_attn.kv_a_proj_with_mqa in Model._attention by ops.linear, ops.rms_norm",
    ".attn.k_rope": "{w}.self_attn.kv_a_proj_with_mqa in Model._attention by ops.linear, ops.rope",
    ".attn.indexer.q": "{w}.self_attn.indexer.wq_b in Model._choose by ops.linear, ops.rope",
    ".attn.indexer.k": "{w}.self_attn.indexer.wk, k_norm in Model._choose by ops.linear, ops.layer_norm, ops.rope",
    ".attn.indexer.weights": "{w}.self_attn.indexer.weights_proj in Model._choose by ops.linear",
    ".attn.indexer.topk.scores": "{w}.self_attn.indexer in Model._choose by ops.indexer_scores",
    ".attn.indexer.topk": "{w}.self_attn.indexer in Model._choose by ops.choose_keys",
    ".attn.core": "{w}.self_attn.kv_b_proj, sinks in Model._core by ops.attend_dense, ops.attend_sparse",
    ".mid": "{w} in Model._layer (residual)",
    ".post_attn_norm": "{w}.post_attention_layernorm in Model._layer by ops.rms_norm",
}
_DENSE = {".mlp": "{w}.mlp in Model._gated by ops.linear, ops.swiglu"}
_MOE = {
    ".moe.router.logits": "{w}.mlp.gate in Model._moe by ops.linear",
    ".moe.router.topk.scores": "{w}.mlp.gate.e_score_correction_bias in Model._moe",
    ".moe.router.topk": "{w}.mlp.gate in Model._moe by ops.choose_experts",
    ".moe.router.weights": "{w}.mlp.gate in Model._moe",
    ".moe.experts": "{w}.mlp.experts in Model._moe by ops.grouped_experts, ops.swiglu_clamped",
    ".moe.shared_expert": "{w}.mlp.shared_experts in Model._gated by ops.linear, ops.swiglu",
    ".moe": "{w}.mlp in Model._moe",
}
_VISION = {
    "vision.patch_embed": "visual.patch_embed in Tower by ops.linear",
    "vision.pos_embed": "visual.pos_embed in Tower.positions",
    "vision.norm": "visual.norm in Tower by ops.layer_norm",
    "vision.merger": "visual.merger in Tower by ops.linear, ops.gelu",
    "merged": "Model._embed",
    "inputs.pixel_values": "accel_impl.vision.pixels",
    "inputs.image_grid": "accel_impl.vision.pixels",
}
_ENDS = {
    "inputs.token_ids": "AccelAdapter.prepare",
    "inputs.position_ids": "AccelAdapter.prepare",
    "embed": "model.embed_tokens in Model._embed",
    "norm": "model.norm in Model.run by ops.rms_norm",
    "logits": "lm_head in Model._logits by ops.linear",
}


def module_paths(config: Config) -> dict[str, str]:
    """Return for every tap the port's own words for its place."""
    places = dict(_ENDS)
    if config.vision is not None:
        places |= _VISION
        for block in range(config.vision.depth):
            places[f"vision.blocks.{block}"] = (
                f"visual.blocks.{block} in Tower._block by ops.layer_norm, ops.linear, ops.attend_patches, ops.gelu"
            )
    for layer in range(config.num_hidden_layers):
        parts = _LAYER | (_DENSE if config.is_dense(layer) else _MOE)
        places |= {f"layers.{layer}{tap}": words.format(w=f"model.layers.{layer}") for tap, words in parts.items()}
    return places
