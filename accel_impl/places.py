"""Where in the port each tap is computed: the weight it belongs to, the function, the operator. Knows names only."""

from __future__ import annotations

from collections.abc import Mapping

from accel_impl.config import Config

_LAYER = {
    "": "{w} in Model._layer",
    ".input_norm": "{w}.input_layernorm in Model._layer by norm.rms",
    ".attn_mix": "{w}.attn_res in Model._mix by residual.mix",
    ".mid": "{w} in Model._layer (residual)",
    ".mlp_mix": "{w}.mlp_res in Model._mix by residual.mix",
    ".post_attn_norm": "{w}.post_attention_layernorm in Model._feed_forward by norm.rms",
}
_RECURRENT = {
    "": "{w}.linear_attn.o_proj in recurrent.recurrent_attention by linear",
    ".q": "{w}.linear_attn.q_proj, conv1d in recurrent.recurrent_attention by linear, conv.causal, norm.unit",
    ".k": "{w}.linear_attn.k_proj, conv1d in recurrent.recurrent_attention by linear, conv.causal, norm.unit",
    ".v": "{w}.linear_attn.v_proj, conv1d in recurrent.recurrent_attention by linear, conv.causal",
    ".decay": "{w}.linear_attn.f_a_proj, f_b_proj, A_log, dt_bias by linear, recurrent.gate",
    ".beta": "{w}.linear_attn.b_proj in recurrent.recurrent_attention by linear",
    ".core": "{w}.linear_attn in recurrent.recurrent_attention by recurrent.prefill, recurrent.decode",
    ".norm": "{w}.linear_attn.o_norm, g_a_proj, g_b_proj in recurrent.recurrent_attention by norm.gated",
}
_SPARSE = {
    "": "{w}.self_attn.o_proj in sparse.sparse_attention by linear",
    ".q_a": "{w}.self_attn.q_a_proj in sparse.sparse_attention by linear",
    ".q_norm": "{w}.self_attn.q_a_layernorm in sparse.sparse_attention by norm.rms",
    ".q": "{w}.self_attn.q_b_proj in sparse.sparse_attention by linear, rope.turn",
    ".kv_latent": "{w}.self_attn.kv_a_proj_with_mqa in sparse.sparse_attention by linear, norm.rms",
    ".k_rope": "{w}.self_attn.kv_a_proj_with_mqa in sparse.sparse_attention by linear, rope.turn",
    ".core": "{w}.self_attn.kv_b_proj, sinks by attn.sparse_prefill, attn.sparse_decode",
}
_INDEXER = {
    ".indexer.q": "{w}.self_attn.indexer.wq_b in sparse._scored by linear, rope.turn",
    ".indexer.k": "{w}.self_attn.indexer.wk, k_norm in sparse._scored by linear, norm.layer, rope.turn",
    ".indexer.weights": "{w}.self_attn.indexer.weights_proj in sparse._scored by linear",
}
_CHOICE = {
    ".indexer.topk.scores": "{w}.self_attn.indexer in sparse._chosen by index.scores",
    ".indexer.topk": "{w}.self_attn.indexer in sparse._chosen by index.select",
}
_PICTURES = {
    ".visual_latent": "{w}.self_attn.visual_kv_proj, visual_norm in sparse.sparse_attention by linear, norm.rms"
}
_DENSE = {".mlp": "{w}.mlp in Held.gated by linear, act.swiglu"}
_MOE = {
    ".moe.router.logits": "{w}.mlp.gate in experts._routed by linear",
    ".moe.router.groups.topk.scores": "{w}.mlp.gate.e_score_correction_bias in experts._of_groups by moe.groups",
    ".moe.router.groups.topk": "{w}.mlp.gate in experts._of_groups by moe.select",
    ".moe.router.topk.scores": "{w}.mlp.gate.e_score_correction_bias in experts._of_groups",
    ".moe.router.topk": "{w}.mlp.gate in experts._routed by moe.select",
    ".moe.router.weights": "{w}.mlp.gate in experts._routed",
    ".moe.experts": "{w}.mlp.experts in experts.experts by moe.experts, act.swiglu_clamped",
    ".moe.shared_expert": "{w}.mlp.shared_experts in Held.gated by linear, act.swiglu",
    ".moe": "{w}.mlp in experts.experts",
}
_VISION = {
    "vision.patch_embed": "visual.patch_embed in Tower._patches",
    "vision.pos_embed": "visual.pos_embed in Tower.positions",
    "vision.norm": "visual.norm in Tower by norm.layer",
    "vision.merger": "visual.merger in Tower._projected by linear, act.gelu",
    "merged": "Model._embed",
    "inputs.pixel_values": "accel_impl.vision.pixels",
    "inputs.image_grid": "accel_impl.vision.pixels",
}
_ENDS = {
    "inputs.token_ids": "AccelAdapter.prepare",
    "inputs.position_ids": "AccelAdapter.prepare",
    "embed": "model.embed_tokens in Model._embed",
    "final_mix": "model.final_res in Model._mix by residual.mix",
    "norm": "model.norm in Model._ends by norm.rms",
    "logits": "lm_head in Model._logits by linear",
}
_FURTHER = {
    "mtp": "{w} in Model._further",
    "mtp.in": "{w}.eh_proj, enorm, hnorm in Model._further by linear, norm.rms",
    "mtp.input_norm": "{w}.input_layernorm in Model._further by norm.rms",
    "mtp.mid": "{w} in Model._further (residual)",
    "mtp.post_attn_norm": "{w}.post_attention_layernorm in Model._feed_forward by norm.rms",
    "mtp.norm": "{w}.shared_head.norm in Model._further by norm.rms",
    "mtp.logits": "lm_head in Model._logits by linear",
}


def module_paths(config: Config) -> dict[str, str]:
    """Return for every tap the port's own words for its place."""
    places = dict(_ENDS)
    if config.vision is not None:
        places |= _VISION
        for block in range(config.vision.depth):
            places[f"vision.blocks.{block}"] = (
                f"visual.blocks.{block} in Tower._block by norm.layer, linear, rope.turn, attn.patches, act.gelu"
            )
        for outlet in range(len(config.vision.deepstack_visual_indexes)):
            words = f"visual.deepstack.{outlet} in Tower._projected by norm.layer, linear, act.gelu"
            places[f"vision.deepstack.{outlet}"] = words
    for layer in range(config.num_hidden_layers):
        own = {tap: words for tap, words in _LAYER.items() if layer or tap != ".attn_mix"}
        places |= _worded(layer, f"layers.{layer}", own | _parts(config, layer))
    if config.further is not None:
        places |= _worded(config.further, "", _FURTHER) | _worded(config.further, "mtp", _parts(config, config.further))
    return places


def _parts(config: Config, layer: int) -> dict[str, str]:
    """Return the taps of a layer's attention and feed-forward."""
    attn = _RECURRENT
    if not config.is_recurrent(layer):
        attn = _SPARSE | ({} if config.policy(layer) == "random" else _INDEXER) | _CHOICE
        if config.vision is not None and layer != config.further:
            attn = attn | _PICTURES
    return {f".attn{tap}": words for tap, words in attn.items()} | (_DENSE if config.is_dense(layer) else _MOE)


def _worded(layer: int, tap: str, parts: Mapping[str, str]) -> dict[str, str]:
    return {f"{tap}{part}": words.format(w=f"model.layers.{layer}") for part, words in parts.items()}
