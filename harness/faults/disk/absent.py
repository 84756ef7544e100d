"""Tensors that a file does not hold any more. Knows names; must not know what they hold."""

from __future__ import annotations

from harness.faults.catalogue import NoPlace
from harness.faults.disk.damage import LAYER, answers, damage, layer_of, named, quantised, weights
from harness.faults.disk.files import Coded, Files

_WITHOUT = "without|missing|needs|no scale|whose weight|FP8|where|shape|zero|group"
_NONE = "none, where|a tensor|missing|expert|layer"


def _drop(files: Files, *gone: Coded) -> list[str]:
    for weight in gone:
        files.drop(*weight.parts.values())
    return [name for weight in gone for name in (weight.name, *weight.parts.values())]


def _without(files: Files, role: str, *, of: str = "") -> list[str]:
    """Drop a part of the one weight that has it (or that has a part `of` another role)."""
    weight = quantised(files, of or role)
    files.drop(weight.parts[role])
    return answers(weight)


def _all_without(files: Files, role: str) -> list[str]:
    """Drop a part of every weight that has it."""
    for weight in weights(files, role=role, layer=None):
        files.drop(weight.parts[role])
    return ["*"]


@damage("headers", _WITHOUT)
def scale_missing(files: Files) -> list[str]:
    """The scales of one weight are missing; loaders take them as 1."""
    return _without(files, "scale")


@damage("headers", _WITHOUT)
def codes_missing(files: Files) -> list[str]:
    """The codes of one weight are missing, its scales are there."""
    return _without(files, "weight", of="scale")


@damage("headers", _WITHOUT)
def global_scale_missing(files: Files) -> list[str]:
    """The second scale of one weight is missing; loaders leave it out."""
    return _without(files, "global")


@damage("headers", _WITHOUT)
def all_global_scales_missing(files: Files) -> list[str]:
    """The second scales of all weights are missing."""
    return _all_without(files, "global")


@damage("headers", _WITHOUT)
def zero_points_missing(files: Files) -> list[str]:
    """The zero points of one weight are missing."""
    return _without(files, "zero")


@damage("headers", "g_idx|order|desc_act|group")
def order_of_inputs_missing(files: Files) -> list[str]:
    """The order of the inputs of one weight is missing; loaders take them as they come."""
    return _without(files, "group")


@damage("headers", "g_idx|order|desc_act|group")
def all_orders_of_inputs_missing(files: Files) -> list[str]:
    """No weight has its order of inputs, and the configuration says that they were reordered."""
    return _all_without(files, "group")


@damage("headers", _WITHOUT)
def stored_shape_missing(files: Files) -> list[str]:
    """The shape of one packed weight is missing."""
    return _without(files, "shape")


@damage("headers", _NONE)
def projection_missing(files: Files) -> list[str]:
    """One projection of one layer is missing whole."""
    return _drop(files, weights(files, kinds="linear router")[0])


@damage("headers", _NONE)
def norm_missing(files: Files) -> list[str]:
    """A norm of one layer is missing; it stays 1."""
    return _drop(files, weights(files, kinds="norm")[-1])


@damage("headers", _NONE)
def router_missing(files: Files) -> list[str]:
    """The router of one layer is missing."""
    return _drop(files, next(w for w in _at(files) if w.name.endswith(("gate.weight", "router.weight"))))


def _at(files: Files) -> list[Coded]:
    found = [w for w in files.weights.values() if layer_of(w.name) == LAYER]
    if not any(w.name.endswith(("gate.weight", "router.weight")) for w in found):
        raise NoPlace("no router here")
    return found


@damage("headers", _NONE)
def bias_missing(files: Files) -> list[str]:
    """One bias of one layer (of a router, where it has one) is missing."""
    found = weights(files, kinds="kept bias")
    return _drop(files, found[-1])


@damage("headers", _NONE)
def expert_missing(files: Files) -> list[str]:
    """One expert of one layer is missing."""
    gone = [w for w in weights(files, kinds="expert") if ".experts.2." in w.name]
    if not gone:
        raise NoPlace("experts are merged here")
    return [*_drop(files, *gone), gone[0].name.split(".experts.")[0] + ".experts"]


@damage("headers", _NONE)
def expert_missing_everywhere(files: Files) -> list[str]:
    """The last expert is missing in every layer."""
    gone = [w for w in weights(files, kinds="expert", layer=None) if ".experts.3." in w.name]
    if not gone:
        raise NoPlace("experts are merged here")
    return [*_drop(files, *gone), "*"]


@damage("headers", "layer")
def layer_missing(files: Files) -> list[str]:
    """One layer is missing whole."""
    gone = [w for w in files.weights.values() if layer_of(w.name) == LAYER]
    return [*_drop(files, *gone), f"*layers.{LAYER}"]


@damage("headers", "layer")
def last_layer_missing(files: Files) -> list[str]:
    """The last layer is missing whole."""
    last = max(n for w in files.weights.values() if (n := layer_of(w.name)) is not None)
    gone = [w for w in files.weights.values() if layer_of(w.name) == last]
    return [*_drop(files, *gone), f"*layers.{last}", "*layers"]


@damage("headers", "up|gate|without")
def a_kind_missing_everywhere(files: Files) -> list[str]:
    """No layer has the matrix that feeds the gated units."""
    ends = (".up_proj.weight", ".w3.weight")
    gone = [w for w in files.weights.values() if w.name.endswith(ends) and w.kind in ("linear", "expert")]
    if not gone:
        raise NoPlace("gate and up are merged here")
    return [*_drop(files, *gone), "*"]


@damage("headers", "value|v_proj|without")
def values_missing_everywhere(files: Files) -> list[str]:
    """No layer has a projection of values."""
    gone = [w for w in files.weights.values() if w.name.endswith(".v_proj.weight")]
    if not gone:
        raise NoPlace("no projection of values of its own")
    return [*_drop(files, *gone), "*"]


@damage("headers", "embedding")
def embedding_missing(files: Files) -> list[str]:
    """The embedding is missing."""
    return [*_drop(files, *weights(files, kinds="embedding", layer=None)), "*"]


@damage("headers", "norm")
def final_norm_missing(files: Files) -> list[str]:
    """The norm after the last layer is missing; it stays 1."""
    return [*_drop(files, files.weights.get("model.norm.weight") or files.weights["norm.weight"]), "*"]


@damage("headers", "head")
def head_missing(files: Files) -> list[str]:
    """The output head is missing, and the configuration does not tie it to the embedding."""
    return [*_drop(files, *weights(files, kinds="head", layer=None)), "*"]


@damage("headers", "global|input|siblings|where|scale")
def second_name_left(files: Files) -> list[str]:
    """The scales of one weight have another name than those of all others."""
    weight = quantised(files)
    files.rename(weight.parts["scale"], weight.parts["scale"] + "_old")
    return [*answers(weight), weight.parts["scale"] + "_old", named(files, "_old")]
