"""A checkpoint of true width from a configuration alone, before there are weights. Knows transformers; no stages.

Names, shapes and dtypes are those that transformers would save such a model in. Values are made as they are written:
FP8 with block scales and gpt-oss's MXFP4 as configured; of any other format the weights are plain, and it is said so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.checkpoint.cut import Cut, Plan, cut_config, depth_of, renamed_in
from harness.checkpoint.folder import INDEX, MAX_INDEX_BYTES, read_json
from harness.checkpoint.names import number
from harness.errors import UsageError
from harness.unreleased.architecture import configuration_of, lists_of

_PROMISED = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_layers", "num_mtp_modules")
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "int64": "I64", "bool": "BOOL"}


def plan_random(source: Path, layers: Sequence[int] | None) -> Plan:
    """Plan random weights for the configuration in a folder, or for some of its layers.

    Raises UsageError where transformers does not know the architecture: nothing else says what tensors it has.
    """
    whole = _config(source)
    depth = depth_of(whole)
    if not depth:
        raise UsageError(f"expected the number of layers in {source / 'config.json'}, found none")
    chosen = tuple(range(depth)) if layers is None else tuple(layers)
    notes: list[str] = []
    config = whole
    if layers is not None:
        config, told = cut_config(whole, chosen, known=lists_of)
        notes += told
    config = _without_extra(config, notes)
    tensors = _tensors(config, source)
    scales = _held_to_index(source, tensors, depth, chosen, notes)
    from harness.unreleased.made import writer_of  # torch is imported when weights are made

    config, write = writer_of(renamed_in(config, tensors, chosen), scales, notes)
    pieces = tuple(piece for name, (dtype, shape) in tensors.items() for piece in write(name, dtype, shape))
    cut = Cut(layers=chosen, depth=depth, random=True, notes=tuple(notes))
    return Plan(cut=cut, config=config, pieces=pieces, source=source.resolve())


def _config(source: Path) -> dict[str, Any]:
    try:
        config, _ = read_json(source / "config.json")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"expected a config.json in {source}, found: {error}; name the folder of a checkpoint"
        ) from None
    if not isinstance(config, dict):
        raise UsageError(f"expected a JSON object in {source / 'config.json'}, found {type(config).__name__}")
    return config


def _without_extra(config: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return a configuration that promises no layers after the last: transformers makes none."""
    new = dict(config)
    if isinstance(new.get("text_config"), dict):
        new["text_config"] = _without_extra(new["text_config"], notes)
    for key in _PROMISED:
        if number(new, key):
            notes.append(f"{key} is 0 here: layers that predict further tokens are not made up")
            new[key] = 0
    return new


def _tensors(config: Mapping[str, Any], source: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each tensor that transformers would save, in the order of its own names."""
    bare = {k: v for k, v in config.items() if k not in ("quantization_config", "compression_config")}
    if configuration_of(bare) is None:
        raise UsageError(
            f"expected a model_type that transformers knows in {source / 'config.json'}, found "
            f"{config.get('model_type')!r}: nothing says which tensors it has. Once its weights are there, --layers "
            "cuts them without transformers"
        )
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    from harness.adapters.hf import _auto

    known = configuration_of(bare)
    said = getattr(known, "dtype", None) or getattr(known.get_text_config(), "dtype", None)
    dtype = said if isinstance(said, torch.dtype) else torch.bfloat16
    with torch.device("meta"):
        model = _auto(transformers, known).from_config(known, dtype=dtype)
    state = remove_tied_weights_from_state_dict(dict(model.state_dict()), model)
    state = revert_weight_conversion(model, state)
    names = {str(v.dtype): str(v.dtype).removeprefix("torch.") for v in state.values()}
    return {k: (_DTYPES[names[str(v.dtype)]], tuple(v.shape)) for k, v in state.items()}


def _held_to_index(
    source: Path, tensors: Mapping[str, Any], depth: int, chosen: Sequence[int], notes: list[str]
) -> frozenset[str]:
    """Hold the names against an index that came with the configuration; return the names of scales that it tells."""
    try:
        index, _ = read_json(source / INDEX, MAX_INDEX_BYTES)
        told = frozenset(index["weight_map"])
    except OSError:
        return frozenset()
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"expected an index with a weight_map at {source / INDEX}, found: {error!r}") from None
    told = frozenset(renamed_in(dict.fromkeys(told, 0), tensors, chosen))
    scales = frozenset(n for n in told if n.endswith(("_scale_inv", "_scales")))
    bare = {n for n in told if not n.endswith(("_scale_inv", "_scales", "_blocks", "_scale"))}
    lost = sorted(bare - set(tensors))
    if lost:
        notes.append(f"{len(lost)} tensors that the index names are not made up, first {lost[0]}")
    return scales
