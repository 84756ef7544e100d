"""Say what a decoder cannot do without and the checkpoint lacks in every layer, or outside of all. Knows names.

What one layer lacks its siblings tell (`expected`); what all lack, or what there is only one of, only its use tells: an
embedding, the norm after the last layer, the third of three projections, a router before experts, promised biases.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.checkpoint.container import Checkpoint
from harness.checkpoint.expected import is_stack, main_stack
from harness.checkpoint.header import Problem
from harness.checkpoint.names import Family, families, number, text_config, tower
from harness.checkpoint.parts import part_of

_TOGETHER: tuple[tuple[frozenset[str], frozenset[str]], ...] = (
    (frozenset({"gate_proj", "up_proj", "down_proj"}), frozenset({"gate_proj"})),
    (frozenset({"w1", "w2", "w3"}), frozenset()),
    (frozenset({"q_proj", "k_proj", "v_proj"}), frozenset()),
)
"""Projections that are used together, and those of them that a model may do without: units without a gate."""
_UNSURE = frozenset({"v_proj", "w3"})
"""Values may be the keys again, and three names may be two: worth a warning."""


def whole_problems(checkpoint: Checkpoint) -> list[Problem]:
    """List what a text decoder of several layers lacks as a whole. Silent where there is no configuration."""
    stacks: dict[str, list[Family]] = defaultdict(list)
    outer = []
    for family in families(checkpoint):
        if family.stack:
            stacks[family.stack].append(family)
        if tower(family.template) == "text" and (not family.stack or "embed" in family.template):
            outer.append(family)
    stack = main_stack(stacks)
    if not stack or not checkpoint.config or not is_stack(stacks[stack]):
        return []
    config = text_config(checkpoint.config)
    return [
        *_outer(stack, stacks[stack], outer, config),
        *_together(stack, stacks[stack]),
        *_routers(stack, stacks[stack]),
        *_biases(stack, stacks[stack], config),
    ]


def _outer(
    stack: str, members: Sequence[Family], outer: Sequence[Family], config: Mapping[str, Any]
) -> Iterator[Problem]:
    """Name a missing embedding, and a missing norm after layers that have one before."""
    at = stack.rpartition(".")[0] or stack
    size = number(config, "vocab_size", "padded_vocab_size", "n_vocab")
    rows = [f.first.shape[0] for f in outer if len(f.first.shape) == 2 and part_of(f.template) != "head"]
    if size and not any(n >= size for n in rows) and not any("embed" in f.template for f in outer):
        found = "none, and the configuration has a vocabulary"
        yield _problem("missing_embedding", at, "an embedding of tokens", found)
    before = any(re.search(r"(^|\.)(input_layernorm|attn_norm|attention_norm)\.", f.leaf) for f in members)
    if before and not any(re.search(r"norm|(^|\.)ln_", f.template) for f in outer):
        found = "none, and layers have norms before their parts"
        yield _problem("missing_norm", at, "a norm after the last layer", found)


def _together(stack: str, members: Sequence[Family]) -> Iterator[Problem]:
    """Name projections that no layer has beside those that are used with them."""
    owners: dict[str, set[str]] = defaultdict(set)
    for family in members:
        module, _, leaf = family.leaf.removesuffix(".weight").rpartition(".")
        if family.leaf.endswith(".weight") and len(family.first.shape) >= 2:
            owners[module].add(leaf)
    for module, names in owners.items():
        for group, free in _TOGETHER:
            gone = group - names
            if len(gone) == 1 and not gone & free and len(names & group) == len(group) - 1:
                (name,) = gone
                beside = " and ".join(sorted(group & names))
                severity = "warning" if name in _UNSURE else "error"
                at = f"{stack}.#.{module}.{name}.weight"
                yield _problem("missing_tensor", at, "a tensor in each layer", f"{beside} without {name}", severity)


def _routers(stack: str, members: Sequence[Family]) -> Iterator[Problem]:
    experts = [f for f in members if part_of(f.template) == "experts"]
    if experts and not any(part_of(f.template) == "router" for f in members):
        found = "experts and none"
        yield _problem("missing_tensor", f"{stack}.#", "a router in layers with experts", found, "warning")


def _biases(stack: str, members: Sequence[Family], config: Mapping[str, Any]) -> Iterator[Problem]:
    """Name biases of attention that the configuration promises and no layer has."""
    own = {f.leaf for f in members if re.search(r"attn|attention", f.leaf)}
    linear = {f.leaf for f in members if f.leaf in own and len(f.first.shape) >= 2}
    promised = config.get("attention_bias") is True
    if promised and linear and not any(leaf.removesuffix("weight") + "bias" in own for leaf in linear):
        found = "none, and attention_bias is true"
        yield _problem("missing_tensor", f"{stack}.#", "biases of attention", found, "warning")


def _problem(kind: str, name: str, expected: str, found: str, severity: str = "error") -> Problem:
    return Problem(kind=kind, name=name, file="", expected=expected, found=found, severity=severity)
