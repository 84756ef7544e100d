"""The likely cause in one sentence, from the pattern of what failed. Knows metrics and tap names; must not know limits.

Each sentence says what the pattern rules in, then what is usually wrong at such a place: a hint, not a verdict.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from harness.diagnose.held import held, joined
from harness.types import Measurement

ACCUMULATED = frozenset({
    "accumulated_ratio", "logits_kl_ratio", "kl_nats_per_token", "top1_agreement", "agreeing_share", "greedy_margin_z",
})  # fmt: skip
"""Metrics of free runs: they gather whatever went wrong before, and name no place."""

FOREMOST = frozenset({"index_problems", "undecodable_tensors", "content_problems"})
"""Metrics of the checkpoint alone: what they find was wrong before the port did anything, a crash included."""

DIRECT = {
    "index_problems": "index, shards, configuration and sibling tensors of the checkpoint do not agree: fetch it again",
    "content_problems": "the file itself is damaged, or is not the one that was published: fetch it again",
    "content_suspicions": "the file holds a matrix unlike its siblings: look at how it was exported",
    "unconvertible_blocks": "blocks whose scales are too far apart for FP8 with one scale for each 128x128",
    "unused_tensors": "a tensor of the checkpoint was never used: a renamed or prefixed key was passed over",
    "unfilled_parameters": "a parameter was never filled: no such tensor, a tie not applied, or a shard dropped",
    "weight_mismatches": "memory does not hold what the checkpoint says: scale, layout, permutation, order or decoder",
    "provenance_mismatches": "a parameter was filled from another tensor than the one it belongs to",
    "undecodable_tensors": "a quantised weight lacks the scales it needs, or they have another shape",
    "untied_heads": "the configuration ties the output head to the embedding, but memory holds something else there",
    "stray_shards": "a file lies beside the checkpoint that its index does not name, and a loader may pick it up",
    "lossy_weight_rel_rms_error": "a weight declared narrower is further off than a good rounding: a wrong scale",
    "narrowed_parameters": "a parameter that the checkpoint keeps wide was narrowed in memory",
    "table_mismatches": "a table that the port computes for itself (rotary frequencies) has other values",
    "suspect_reference": "the reference itself looks wrong here: settle it before believing what differs from it",
    "undeclared_precision_share": "the weights are held in another precision than the port declares",
    "conversion_mismatches": "what a conversion on line gives depends on what its workspace held: not all is written",
    "conversion_peak_over_promise": "converting on line holds more than what stays, one workspace and one layer",
    "packed_originals_kept": "packed originals stay in memory beside what they became",
    "unexplained_buffers": "a buffer that neither the checkpoint nor a rule explains, and that the reference has not",
    "unchecked_orders": "a fused weight whose order no parameter of the reference vouches for",
    "unseen_taps": "taps of the reference that the port does not show, so nothing can be localised there",
    "ttft_s": "the first token comes later than promised",
    "tokens_per_s": "fewer tokens a second than promised",
    "nonfinite_weights": "a loaded weight is not finite: a wrong decoder or scale, or memory never written",
    "load_peak_over_plan": "loading holds more than the plan: whole shards or decoded copies are kept alive",
    "op_error_ratio": "an operator alone is further off than its roundings allow: the kernel, not the model",
    "op_wrong_indices": "an operator alone chooses or writes the wrong places",
    "op_nonfinite_mismatches": "an operator alone swallows or makes NaN or infinity: masks, overflow, or a missing max",
    "op_neighbours_changed": "an operator writes outside of its output: strides, offset, or a tail without a mask",
    "op_inputs_changed": "an operator changes what it was only given to read: it works in place",
    "op_refusals": "an operator declines inputs that its formula has: no kernel for their size, dtype or layout",
    "op_not_repeatable": "the same call twice gives other bits: sums left to chance, or memory never written",
    "op_contract_failures": "a custom operator breaks its own contract: schema, fake kernel, or aliasing",
    "op_host_fallbacks": "operators run on the host, with a copy there and back each time",
    "shadow_error_ratio": "an operator of the device is further off than its roundings allow, on the model's own input",
    "shadow_wrong_elements": "an operator of the device reads, writes or chooses wrong places, on the model's input",
    "shadow_changed_elements": "repeating operators changed a result: something depends on timing",
    "shadow_compared_calls": "no operator of the device could be repeated on the CPU",
    "runtime_problems": "the device's runtime does not keep what torch.accelerator promises",
    "ready_tokens": "the process is up but cannot generate: being ready must mean one real generation",
    "tokenizer_mismatches": "the same text becomes other ids: special tokens, a second BOS, normalisation",
    "template_mismatches": "the chat template renders another prompt: roles, generation prompt, or a second BOS",
    "eos_mismatches": "generation ends on other ids: not all end-of-sequence ids of the configuration count",
    "concurrency_mismatches": "requests disturb each other: a shared slot, wrong lengths or padding in a batch",
    "endpoint_errors": "the endpoint does not answer as the protocol says",
    "input_rel_rms_error": "the pixels differ already: resizing, normalisation, channel or patch order",
    "greedy_margin_z": "another token was chosen where the reference was sure",
    "repeat_ratio": "the same input twice gives other values: a race, memory never written, or sums left to chance",
    "compiled_ratio": "compiled and uncompiled differ: what the compiler fuses, reorders or specialises on",
    "unexercised": "the cases did not reach it, so nothing is said of it",
    "padding_probability": "columns beyond the vocabulary can be sampled: padded rows of the output matrix, not masked",
    "taps_change_logits": "looking at the port changes it: a tap aliases a buffer, or hooks switch off a path",
    "collective_wrong_elements": "a collective gives wrong sums: group, datatype, uneven sizes, or an early buffer",
    "rank_disagreements": "ranks that must hold the same do not: a missing reduction, or one rank's own slice",
    "rank_missing": "a rank did not report: it crashed, hung, or never joined",
    "peak_over_plan": "memory grows beyond the plan with length: something is kept per token or per request",
    "decode_latency_median_s": "a decode step is slower than promised",
    "decode_latency_p90_s": "the tail of decode steps is slower than promised",
    "decode_jitter_ratio": "decode steps vary: recompilation, growing buffers, or fallbacks at some lengths",
    "decision_coverage_share": "the cases did not reach every expert, or never made a selection choose",
    "idle_experts": "experts that the cases did not reach enough: their weights were checked, their use was not",
    "decision_size_mismatches": "another number of items is chosen: k, the padding of short rows, or repeated ids",
    "decision_outside_valid": "items are chosen that are not allowed: the causal limit, a mask, or ids out of range",
}  # fmt: skip

STRUCTURE = {
    "bias_beyond_noise": "no larger than rounding, but always to the same side: a bias, or a rounding mode",
    "growth_beyond_noise": "no larger than rounding, but it begins or grows on the way: positions, a state, or a page",
}
"""What an error's structure means where its size alone would pass."""

AT = {
    "runtime.allocated": "the device counts memory that is freed: its allocator or runtime, before any port",
    "endpoint.stream": "a stream does not join to the answer in one piece: tokens decoded alone split characters",
    "slots.repeat": "the same request alone gives other tokens the second time: state or cache of an earlier one is "
    "left, or the port is not deterministic",
    "endpoint.concurrent": "requests disturb each other: a shared slot or page, wrong lengths or padding in a batch",
    "endpoint.completion": "the endpoint answers otherwise than the port itself: its prompt, template or sampling",
    "endpoint.chat": "the endpoint answers otherwise than the port itself: its prompt, template or sampling",
    "endpoint.finish_reason": "the endpoint tells a wrong reason to stop: end-of-sequence ids, or the token limit",
    "endpoint.usage": "the endpoint counts other tokens than the port gave: a second BOS, or a hidden last token",
    "endpoint.chat_usage": "the endpoint counts other tokens than the port gave: a second BOS, or a hidden last token",
    "endpoint.bad_input": "nonsense is not refused as the client's error, or the server does not survive it",
    "template.prepared": "a conversation becomes other ids: a second BOS, or special tokens that are split",
    "tokenizer.decode": "the same ids become another text: skipped special tokens, spaces, or the decoder",
    "tokenizer.decode_partial": "ids cut inside a character become another text: the decoder or its byte fallback",
}  # fmt: skip
"""Subjects that say more than their metric does."""

BROKEN_OFF = {
    "crash": "the process died: memory that is not its own, an abort in native code, or a missing library",
    "hang": "no sign of life: a wait for something that never comes, or a step far slower than the watchdog allows",
    "memory": "out of memory: what is held there, or was kept from before, is more than there is",
    "raised": "the code itself gave up: its own words say why",
}  # fmt: skip
"""What it means when a run did not end, by the kind of its end."""

TYPICAL = (
    (r"norm\.in$", "what comes before the norm and shows nowhere else: a residual, a convolution, a state, a gate"),
    (r"norm", "epsilon, weight offset (w or 1 + w), the precision of the mean"),
    (r"indexer\.(q|k)$|(^|\.)(q|k|k_rope|rope|rotary)(_\w+)?$", "rotary style, its base or scaling, or permuted rows"),
    (r"indexer", "causal limit, rotary style, head weights, or a rotation applied to one side only"),
    (r"router|gate", "sigmoid or softmax, the correction bias, group masking, renormalisation, the scaling factor"),
    (r"experts", "order of gate and up, the activation's clamp, expert order, or a decoder's scale"),
    (r"shared_expert|mlp", "the activation, its clamp, or order of gate and up"),
    (
        r"attn\.core|attn\.sdpa",
        "rotary angles, softmax scale, sinks, soft cap, window, or the mask's alignment; where a state is kept its "
        "decay, gate, convolution or skip",
    ),
    (r"attn(\.o_proj)?$", "the output projection: weights, head order, or a missing reduction"),
    (r"^embed$", "the table, its scale, or ids beyond it"),
    (r"^merged$", "the place or the order of the image rows"),
    (r"pos_embed", "resizing of the position table, or the order of patches"),
    (r"patch_embed", "patch order, channel order, or normalisation"),
    (r"merger", "the order of the patches that are merged, or the activation"),
    (r"^logits$", "soft cap, scale, a head that is tied or not, padded vocabulary rows"),
    (r"state|conv", "a state that is transposed, not reset, or cut at a chunk's edge"),
    (r"(^|\.)(layers|blocks)\.\d+$|\.mid$", "its own glue: the residual, its scale, or the block's boundary"),
)  # fmt: skip

PHASES = {
    "decode": "only in decode: position, mask alignment, cache contents or state of single steps",
    "chunked": "only after the first chunk: mask alignment, positions, or the cache between chunks",
    "slot": "only in a slot that was used before: something of the earlier request is left",
    "generate": "only in generation: sampling, stopping, or the cache between steps",
}

SLICES = {
    "head": "one head: a slice, a sink, a scale or a table of that head",
    "expert": "one expert only: its weights, its scale, or its place in the map",
    "position": "only some positions: rotary angles, the mask, a window, or a page or chunk edge",
    "channel": "some channels only: a block scale, a bias, a permutation, or a partial sum",
    "token": "only some tokens: outliers, a clamp, padding, or an edge that they sit on",
    "row": "only some rows of a picture: its grid, its resizing, or the order of its patches",
    "column": "only some columns of a picture: its grid, its resizing, or the order of its patches",
    "picture": "only some pictures: bounds between them, or their order",
    "call": "only some calls of a request: a chunk, a step, or what is kept between them",
    "shard": "only some shares of a split: a rank's own slice",
    "stride": "only every so many-th token: a tile, a vector width, or a block of a kernel",
}
"""What it means when slices fail and the whole does not, the most telling first."""

UNLIKE = 0.3
"""Share of the right values that values hold, at most, to be called others."""

STANDS_OUT = {"head": 1.8, "expert": 1.8, "position": 2.0, "channel": 4.0, "token": 4.0}
"""How many times the whole's ratio a slice's is when the error sits in that slice (one of five heads reads 2.2)."""


def cause_of(tap: str, failing: Sequence[Measurement]) -> str:
    """Return the likely cause at a place in one sentence. `failing` are its failing measurements, the worst first."""
    pattern = _pattern(tap, failing)
    typical = next((text for regex, text in TYPICAL if re.search(regex, tap) or re.search(regex, _bare(tap))), "")
    wants_hint = any(
        m.metric in ("error_ratio", "accumulated_ratio", "logits_kl_ratio") and _is_number(m) for m in failing
    )
    parts = [pattern, _only(failing)]
    split = bool(parts[1]) and "layout" in failing[0].where
    if typical and wants_hint and not split and not any(m.metric in DIRECT for m in failing):
        parts.append(f"usual there: {typical}")
    return "; ".join(p for p in parts if p)


def _bare(tap: str) -> str:
    return re.sub(r"\.in(\.\w+)?$", "", tap)


def _is_number(m: Measurement) -> bool:
    return m.value is not None and math.isfinite(m.value)


def _pattern(tap: str, failing: Sequence[Measurement]) -> str:
    """Return what kind of difference the failing metrics and slices show."""
    missing = [m for m in failing if m.problem]
    if missing and len(missing) == len(failing):
        return _missing(missing[0])
    if any(m.value is not None and not math.isfinite(m.value) for m in failing):
        return "not a finite number: an overflow, a division by zero, a fully masked row, or memory never written"
    if any(m.metric == "exact_mismatches" for m in failing):
        return _exact(tap)
    metrics = {m.metric for m in failing}
    telling = sorted(failing, key=lambda m: m.metric != "nonfinite_weights")  # what else is wrong there follows from it
    direct = next((_direct(m) for m in telling if m.metric in DIRECT), "")
    if direct:
        return direct
    if metrics <= {"decision_margin_z", "decision_flips_excess"}:
        return "other items are chosen than noise explains: the rule of choice, a bias, or the scores themselves"
    if metrics <= ACCUMULATED:
        return (
            "no unit is wrong by itself, but the error grows beyond the floor's on the way: what passes between units"
        )
    scaled = [m for m in failing if m.metric == "slope_beyond_noise"]
    part = [m for m in scaled if m.where.get("slice") == "expert"] or _heads_alone(scaled)
    if part or (scaled and "error_ratio" not in metrics):
        return _scaled(part or scaled)
    shape = next((STRUCTURE[m.metric] for m in failing if m.metric in STRUCTURE), "")
    if "error_ratio" not in metrics and shape:
        return shape
    if "error_ratio" not in metrics:
        return f"{failing[0].metric.replace('_', ' ')}: outside what was promised"
    return _slices(tap, failing)


def _direct(m: Measurement) -> str:
    """Return what a metric that names its own cause says: of the very values, of its subject, or in general."""
    if m.subject.startswith("operators."):
        return f"{DIRECT[m.metric]}; {m.detail['pattern']}" if m.detail.get("pattern") else DIRECT[m.metric]
    pattern = held(m.detail) or (joined(m.detail) if m.metric == "provenance_mismatches" else "")
    if pattern:
        return f"memory holds {pattern}"
    if m.metric == "weight_mismatches" and m.detail.get("source") and m.detail.get("match") == "content":
        return f"memory holds other values where {m.detail['source']} belongs: a scale, a decoder, or never written"
    return AT.get(m.subject, DIRECT[m.metric])


def _missing(m: Measurement) -> str:
    if m.problem == "missing":
        return "promised, but the port does not show it: record it, or declare it unobservable with a reason"
    if m.problem == "no_signal":
        return "no signal where one was expected: the input cannot tell right from wrong here"
    if m.problem == "too_few":
        return "too few samples to say anything: longer or more cases are needed"
    if str(m.detail.get("message", "")).startswith("expected the shape"):
        return "another shape than the reference's: a padded, cut or differently joined tensor"
    return "promised, but it could not be measured"


def _heads_alone(scaled: Sequence[Measurement]) -> list[Measurement]:
    """Return the slopes of heads where one stands out of the whole's: the others are right."""
    whole = max((abs(float(m.detail.get("slope", 0))) for m in scaled if m.where.get("slice") == "whole"), default=0.0)
    heads = [m for m in scaled if m.where.get("slice") == "head"]
    return [m for m in heads if abs(float(m.detail.get("slope", 0))) > STANDS_OUT["head"] * whole]


def _scaled(failing: Sequence[Measurement]) -> str:
    """Say which share of the signal the error is, and where: the slice that stands out, or all of it."""
    worst = max(failing, key=lambda m: abs(float(m.detail.get("slope", 0.0))))
    kind = str(worst.where.get("slice", "whole"))
    several = {m.where.get(kind): 1 + float(m.detail.get("slope", 0.0)) for m in failing} if kind == "expert" else {}
    if len(several) > 1 or any(t < UNLIKE for t in several.values()):
        return _several(several)
    where = f"{kind} {worst.where.get(kind, '')}" if kind != "whole" else "the whole unit"
    times = 1 + float(worst.detail.get("slope", 0.0))
    return f"scaled: in {where} the values are {times:.4f} times what they should be"


def _exact(tap: str) -> str:
    if "token_ids" in tap:
        return "the ids differ before the model runs: tokenizer, template, or image placeholders"
    if "position" in tap:
        return "the positions differ before the model runs: offset, padding, or image positions"
    if "grid" in tap or "pixel" in tap:
        return "the picture is cut differently: resizing, patch size, or order"
    if "mask" in tap:
        return "the mask differs: causal alignment, window, padding, or the picture's bounds"
    return "a value that must be equal is not"


def _several(times: Mapping[Any, float]) -> str:
    """Say what several experts have in common: values that are not theirs, or something that all of them do."""
    named = ", ".join(str(e) for e in sorted(times, key=str)[:6]) + (", ..." if len(times) > 6 else "")
    low, high = min(times.values()), max(times.values())
    if high < UNLIKE:
        who = f"experts, {named} among them, give" if len(times) > 1 else f"expert {named} gives"
        return f"{who} values unlike those due: exchanged, misplaced in the map, or other weights"
    return f"scaled: in experts, {named} among them, the values are {low:.4g} to {high:.4g} times what they should be"


def _slices(tap: str, failing: Sequence[Measurement]) -> str:
    """Say which slices are wrong: only some where the whole holds, or mostly some where they stand out of the whole."""
    worst: dict[str, Measurement] = {}
    for m in failing:
        kind = str(m.where.get("slice", "whole"))
        if m.metric == "error_ratio" and (kind not in worst or (m.value or 0.0) > (worst[kind].value or 0.0)):
            worst[kind] = m
    if "whole" not in worst:
        named = [SLICES[kind] for kind in SLICES if kind in worst]
        return named[0] if named else "off by more than rounding"
    whole = worst["whole"].value or 0.0
    size = "wrong" if whole >= 10 else "off by more than rounding"
    where = "the glue in front of it" if tap != _bare(tap) else "the whole unit"
    out = [k for k, times in STANDS_OUT.items() if k in worst and (worst[k].value or 0.0) >= times * whole]
    mostly = f", mostly {out[0]} {worst[out[0]].where.get(out[0], '')}" if out else ""
    return f"{size} in {where} (error {whole:.3g} times the floor's){mostly}"


def _only(failing: Sequence[Measurement]) -> str:
    """Say when only one phase or only split layouts fail; the plain prefill on one card is always measured too."""
    layouts = {str(m.where.get("layout", "single")) for m in failing}
    if layouts and "single" not in layouts:
        return f"only when split as {', '.join(sorted(layouts))}: a slice, a reduction, or a rank's own copy"
    phases = {str(m.where.get("phase", "prefill")) for m in failing}
    if "prefill" in phases or not phases:
        return ""
    known = [text for word, text in PHASES.items() if any(word in p for p in phases)]
    return known[0] if len(phases) == 1 and known else f"only in {', '.join(sorted(phases))}, not in a plain prefill"
