"""Names of places. Knows the grammar of tap names, their kinds and levels; must not know tensors or modules.

Grammar. A tap is named by the canonical path of the unit whose output it is (`PATH.out.N` a further output); `PATH.in`
is the unit's input as computed (`PATH.in.NAME`, `PATH.in.NAME.0` a further one). The tree is the same for every
architecture:

    inputs.token_ids inputs.position_ids inputs.pixel_values inputs.image_grid   exact inputs
    embed                                                               token embedding             level 1
    merged                                                              embedding with image rows   level 1
    layers.N                                                            decoder layer               level 1
    layers.N.{attn,moe,mlp,input_norm,post_attn_norm,...}                          its children                level 2
    layers.N.attn.{q_proj,...,core,indexer,indexer.topk}                           their parts                 level 3
    layers.N.moe.{router,router.topk,experts,shared_expert}
    norm  logits                                                                   final norm, logits          level 1
    mtp  mtp.{in,attn,moe,logits,...}                  a layer that predicts one more token, its parts       level 1, 2
    vision.{pixels,patch_embed,pos_embed,blocks.N,norm,merger}                     tower                       level 1

`X.topk` (several in one unit: `X.topk`, `X.topk.1`, ...) holds the chosen ids, `X.topk.scores` what chose them.
`X.parts` holds the terms that X's output is the sum of (an expert's share each) and `X.parts.owner` whose they are; the
oracle alone records them, at some of its channels.
A port's module that is not recognised keeps its own name.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from functools import lru_cache

KINDS = ("input", "hidden", "weight", "routing", "selection", "scores", "state", "cache", "mask", "logits", "parts")
PINNED_KINDS = frozenset({"hidden"})
DECISION_KINDS = frozenset({"routing", "selection"})
EXACT_KINDS = frozenset({"input", "mask"})
"""Kinds that are compared by equality."""

PART_CHANNELS = 512
"""Most channels of an output that the parts of it are kept at."""

_CONTAINER = re.compile(r"^(layers|vision\.blocks|[\w.]*?\.?(?:blocks|layers|h))\.(\d+)|^mtp(\.\d+)?(?=\.|$)")


_INPUT = re.compile(r"\.in(\.\w+(\.\d+)?)?$")
_OUTPUT = re.compile(r"\.out\.\d+$")
_CHOICE = re.compile(r"(top_?k|rout\w*|select\w*|expert)_\w*(ind|idx|ids|experts)|^(selected_experts|expert_ids)")

_remembered = lru_cache(maxsize=1 << 16)
"""The same names are asked about at every call of a model, and of every run that is compared."""


@_remembered
def unit_of(tap: str) -> str:
    """Return the unit that produced a tap: `layers.3.attn.in.mask` and `layers.3.attn.out.1` -> `layers.3.attn`."""
    return _OUTPUT.sub("", _INPUT.sub("", tap))


@_remembered
def is_input(tap: str) -> bool:
    """Say whether a tap is a unit's input as computed (it measures the glue in front of the unit)."""
    return _INPUT.search(tap) is not None


@_remembered
def is_choice(argument: str) -> bool:
    """Say whether an integer argument of this name is a decision made elsewhere (`top_k_index`, `router_indices`)."""
    return _CHOICE.search(argument) is not None


@_remembered
def level_of(tap: str) -> int:
    """Return 1 for layers and everything beside them, 2 for their children, 3 for anything deeper."""
    unit = unit_of(tap)
    match = _CONTAINER.match(unit)
    if match is None:
        return min(3, 1 + max(0, unit.count(".") - (1 if unit.startswith("vision.") else 0)))
    rest = unit[match.end() :]
    return min(3, 1 + rest.count("."))


@_remembered
def layer_of(tap: str) -> str:
    """Return the layer or block that a tap lies in (`layers.3`), or the unit itself."""
    match = _CONTAINER.match(tap)
    return match.group(0) if match else unit_of(tap)


@_remembered
def child_of(tap: str) -> str:
    """Return the layer's child that a tap lies in: `layers.3.moe.router.out.1` -> `layers.3.moe`."""
    layer = layer_of(tap)
    return f"{layer}.{tap[len(layer) + 1 :].split('.')[0]}" if tap.startswith(layer + ".") else layer


@_remembered
def kind_of(tap: str) -> str:
    """Guess a tap's kind from its name, for ports that do not say."""
    if tap.startswith("inputs."):
        return "input"
    if re.fullmatch(r"(mtp(\.\d+)?\.)?logits", tap):
        return "logits"
    if tap.endswith((".parts", ".parts.owner")):
        return "parts"
    if tap.endswith(".scores"):
        return "scores"
    if re.search(r"\.topk(\.\d+)?$", tap) or (is_input(tap) and is_choice(tap.rsplit(".in.", 1)[-1])):
        return "routing" if re.search(r"\.(moe|mlp|router|experts)(\.|$)", tap) else "selection"
    if re.search(r"(^|\.)(mask|attention_mask)$", tap):
        return "mask"
    if re.search(r"(^|\.)(state|conv_state|initial_state)$", tap):
        return "state"
    if re.search(r"(^|\.)(cache|k_cache|v_cache|kv_cache)$", tap):
        return "cache"
    return "hidden"


def part_step(width: int) -> int:
    """Return the distance of the channels that parts of an output of `width` channels are kept at."""
    return -(-width // PART_CHANNELS)


def matches(tap: str, globs: Iterable[str]) -> bool:
    """Say whether a tap matches any of the globs; no glob matches everything."""
    globs = tuple(globs)
    return not globs or any(fnmatch.fnmatchcase(tap, g) for g in globs)


def decisions_under(unit: str, taps: Iterable[str]) -> list[str]:
    """Return the decision taps inside a unit (its own and its parts'), in the order given."""
    return [t for t in taps if kind_of(t) in DECISION_KINDS and (t == unit or t.startswith(unit + "."))]
