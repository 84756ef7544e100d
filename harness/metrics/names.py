"""The known metrics and their units. A criterion that names another one is refused before anything runs.

The unit is part of the promise: a measurement whose unit differs from its criterion's is an ERROR.
"""

from __future__ import annotations

from collections.abc import Mapping

METRICS: Mapping[str, str] = {
    # load
    "index_problems": "count",
    "stray_shards": "count",
    "undecodable_tensors": "count",
    "content_problems": "count",
    "content_suspicions": "count",
    "unconvertible_blocks": "count",
    "unused_tensors": "count",
    "unfilled_parameters": "count",
    "weight_mismatches": "count",
    "provenance_mismatches": "count",
    "nonfinite_weights": "count",
    "untied_heads": "count",
    "lossy_weight_rel_rms_error": "ratio",
    "narrowed_parameters": "count",
    "undeclared_precision_share": "share",
    "table_mismatches": "count",
    "suspect_reference": "count",
    "unchecked_orders": "count",
    "unexplained_buffers": "count",
    "load_peak_over_plan": "ratio",
    "conversion_mismatches": "count",
    "conversion_peak_over_promise": "ratio",
    "packed_originals_kept": "count",
    # startup
    "op_error_ratio": "ratio",
    "op_wrong_indices": "count",
    "op_nonfinite_mismatches": "count",
    "op_neighbours_changed": "count",
    "op_inputs_changed": "count",
    "op_not_repeatable": "count",
    "op_refusals": "count",
    "op_contract_failures": "count",
    "op_host_fallbacks": "count",
    "runtime_problems": "count",
    "shadow_error_ratio": "ratio",
    "shadow_wrong_elements": "count",
    "shadow_changed_elements": "count",
    "shadow_compared_calls": "count",
    "ready_tokens": "tokens",
    "tokenizer_mismatches": "count",
    "template_mismatches": "count",
    "eos_mismatches": "count",
    "concurrency_mismatches": "count",
    "endpoint_errors": "count",
    "ttft_s": "s",
    "tokens_per_s": "tokens/s",
    # values, any stage that compares traces
    "exact_mismatches": "count",
    "input_rel_rms_error": "ratio",
    "error_ratio": "ratio",
    "slope_beyond_noise": "ratio",
    "bias_beyond_noise": "ratio",
    "growth_beyond_noise": "ratio",
    "accumulated_ratio": "ratio",
    "logits_kl_ratio": "ratio",
    "kl_nats_per_token": "nats/token",
    "top1_agreement": "share",
    "padding_probability": "share",
    "unseen_taps": "count",
    # decisions
    "decision_margin_z": "z",
    "decision_flips_excess": "count",
    "decision_size_mismatches": "count",
    "decision_outside_valid": "count",
    "agreeing_share": "share",
    "idle_experts": "count",
    # text
    "greedy_margin_z": "z",
    "taps_change_logits": "count",
    "repeat_ratio": "ratio",
    "compiled_ratio": "ratio",
    # multi_card
    "collective_wrong_elements": "count",
    "rank_disagreements": "count",
    "rank_missing": "count",
    # long_context
    "decode_latency_median_s": "s",
    "decode_latency_p90_s": "s",
    "decode_jitter_ratio": "ratio",
    "peak_over_plan": "ratio",
    # coverage
    "decision_coverage_share": "share",
    "unexercised": "count",
}
