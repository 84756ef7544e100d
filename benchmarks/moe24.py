"""The model that the benchmarks run: a random Qwen3-MoE of 24 layers, hidden 512, on 256 tokens. Must not know day0.

Needs torch and transformers only, so that another tool's environment can run it too.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

TOKENS, VOCAB = 256, 8192


def build(dtype: str, *, layers: int = 24, attention: str = "sdpa", experts: str = "grouped_mm", seed: int = 0) -> Any:
    """Return the model with seeded random weights: 32 experts of which 8 are active, 8 heads, 4 of them for keys."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=512, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64, num_experts=32, num_experts_per_tok=8, moe_intermediate_size=192, norm_topk_prob=True,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention)
    model.config._experts_implementation = experts
    return model.eval().requires_grad_(False)


def inputs(tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    """Return seeded token ids and positions, each [1, tokens]."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (1, tokens), generator=generator)
    return {"input_ids": ids, "position_ids": torch.arange(tokens)[None]}


def plain(model: Any, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Run a prefill as a user would."""
    with torch.no_grad():
        logits: torch.Tensor = model(**given, use_cache=True).logits
    return logits


Side = Callable[[], AbstractContextManager[Callable[[], object]]]
"""Gets a side ready (hooks attached), gives what is timed, and takes everything off again."""


def cpu_seconds(function: Callable[[], object]) -> float:
    """Return the CPU seconds of this process, kernel included, that one call takes."""
    gc.collect()
    begin = time.process_time()
    function()
    return time.process_time() - begin


def always(function: Callable[[], object]) -> Side:
    """Return a side that needs no getting ready."""
    return lambda: nullcontext(function)


def interleaved(sides: Mapping[str, Side], rounds: int) -> dict[str, list[float]]:
    """Time every side once in each round, the order turned from round to round, after one round unmeasured."""
    names, seconds = list(sides), {name: list[float]() for name in sides}
    for number in range(-1, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            with sides[name]() as timed:
                took = cpu_seconds(timed)
            if number >= 0:
                seconds[name].append(took)
    return seconds


def ratios(seconds: Mapping[str, list[float]], base: str) -> dict[str, dict[str, float]]:
    """Return for each side the median seconds, and median, least and greatest of its ratio to the base by round."""
    found = {}
    for name, each in seconds.items():
        by_round = [a / b for a, b in zip(each, seconds[base], strict=True)]
        found[name] = {
            "cpu_s": statistics.median(each),
            "ratio": statistics.median(by_round),
            "least": min(by_round),
            "greatest": max(by_round),
        }
    return found


def rows_of(table: Mapping[str, Any], dtype: str, aims: Mapping[str, float]) -> list[str]:
    """Return the lines of a markdown table of sides; `aims` gives the ratio aimed at, where there is one."""
    lines = [f"| side ({dtype}) | CPU s | ratio | least-greatest | aim |", "|---|---|---|---|---|"]
    for name, row in table.items():
        if "skipped" in row:
            lines.append(f"| {name} | | | skipped: {row['skipped']} | |")
            continue
        aim = f"{aims[name]:g}" if name in aims else ""
        spread = f"{row['least']:.2f}-{row['greatest']:.2f}"
        lines.append(f"| {name} | {row['cpu_s']:.3f} | {row['ratio']:.2f} | {spread} | {aim} |")
    return lines
