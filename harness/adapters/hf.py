"""Any transformers text or image-text checkpoint folder as an adapter. Knows transformers (lazily); no model class.

    hf:PATH?attn=eager&experts=eager&compile=aot_eager&trust_remote_code=1&stream=1

The model is loaded in its precision (never cast afterwards, which would round rotary tables too); parameters that
transformers keeps in float32 stay there, or become float64 for a float64 oracle. With `stream=1`, or where the weights
would not fit in memory (and `stream=0` was not said), they pass through a bounded window instead: `stream`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.adapters.module import Loaded, ModuleAdapter
from harness.adapters.scope import free_bytes
from harness.errors import CheckpointError, SpecError
from harness.types import Setup

OPTIONS = ("attn", "experts", "trust_remote_code", "stream")
MOST_PLANNED = 32
"""Times what is stored that a load is planned at, at most: four bits become 64, and the rest is less than that."""


def hf_adapter(checkpoint: Path, setup: Setup) -> ModuleAdapter:
    """Return the adapter of a checkpoint folder; nothing is loaded yet. Raises SpecError for an unknown option."""
    _transformers()
    name = f"hf:{checkpoint.name}"
    if not _is_streamed(checkpoint, setup):
        return ModuleAdapter(load_module, checkpoint, setup, name=name, options=OPTIONS, wide=True)
    from harness.adapters.stream import StreamedAdapter, open_window

    window = open_window(checkpoint)
    load = partial(load_streamed, window=window)
    return StreamedAdapter(load, window, checkpoint, setup, name=name, options=OPTIONS, wide=True)


def _is_streamed(checkpoint: Path, setup: Setup) -> bool:
    """Say whether weights are streamed: as the user says, else where they would take more than the free memory."""
    said = setup.options.get("stream", "")
    if said not in ("", "0", "1"):
        raise SpecError(f"expected stream=1 or stream=0, found stream={said}")
    if said or setup.options.get("compile"):
        if said == "1" and "compile" in setup.options:
            raise SpecError("stream=1 and compile= exclude each other: compiled layers keep the weights they had")
        return said == "1"
    free, stored = free_bytes(), sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    if free is None or MOST_PLANNED * stored <= free:
        return False  # without reading half a million names
    from harness.checkpoint import open_checkpoint, planned_bytes

    try:
        needed = planned_bytes(open_checkpoint(checkpoint), setup.dtype)
    except CheckpointError:
        return False
    if needed <= free:
        return False
    words = f"a load in {setup.dtype} is planned at {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
    print(f"hf:{checkpoint.name}: weights are streamed, for {words}; stream=0 loads them all the same", file=sys.stderr)
    return True


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise SpecError(
            f"hf: needs transformers, which cannot be imported ({error}); pip install 'day0[hf]'"
        ) from error
    return transformers


def load_module(checkpoint: Path, setup: Setup) -> Loaded:
    """Load with the class that the configuration asks for, in the setup's precision and on its device."""
    module, info = _from_folder(checkpoint, setup, quantised=True)
    if setup.dtype == "float64":
        _widen(module)
    return Loaded(module=module.to(setup.device), facts=_facts(module, info))


def load_streamed(checkpoint: Path, setup: Setup, *, window: Any) -> Loaded:
    """Build the module without its weights; they come from the window while it runs."""
    from harness.adapters.stream.folder import build

    wide = setup.dtype == "float64"
    call = partial(_from_folder, checkpoint, setup, quantised=False)
    module, info = build(window.weights, call, setup.dtype, wide=wide)
    if wide:
        _widen(module)
    return Loaded(module=module, facts=_facts(module, info))


def _from_folder(checkpoint: Path, setup: Setup, *, quantised: bool) -> tuple[Any, Mapping[str, Any]]:
    """Call `from_pretrained`; return its module and what it says of loading."""
    transformers = _transformers()
    transformers.utils.logging.disable_progress_bar()
    trust = setup.options.get("trust_remote_code", "0") == "1"
    config = transformers.AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust, local_files_only=True)
    given: dict[str, Any] = {"config": config, "dtype": getattr(torch, setup.dtype), "trust_remote_code": trust}
    if "attn" in setup.options:
        given["attn_implementation"] = setup.options["attn"]
    experts = setup.options.get("experts", "eager" if setup.dtype == "float64" else "")
    if experts:  # grouped matrix products have no float64
        given["experts_implementation"] = experts
    if not quantised:  # what is packed is decoded before the library sees it
        for owner in (config, config.get_text_config()):
            if getattr(owner, "quantization_config", None) is not None:
                del owner.quantization_config
    found: tuple[Any, Mapping[str, Any]] = _auto(transformers, config).from_pretrained(
        checkpoint, output_loading_info=True, local_files_only=True, use_safetensors=True, **given
    )
    return found


def _facts(module: Any, info: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "unfilled": sorted(info["missing_keys"]),
        "unused": sorted(info["unexpected_keys"]),
        "mismatched": sorted(str(key) for key in info["mismatched_keys"]),
        "class": type(module).__name__,
        "attention": str(getattr(module.config, "_attn_implementation", "")),
        "experts": str(getattr(module.config, "_experts_implementation", "")),
    }


def _auto(transformers: Any, config: Any) -> Any:
    """Return the auto class that knows a configuration: image and text where it has a vision part, or else text."""
    names = ["AutoModelForCausalLM", "AutoModelForImageTextToText"]
    if hasattr(config, "vision_config"):
        names.reverse()
    for name in names:
        auto = getattr(transformers, name, None)
        custom = name in dict(getattr(config, "auto_map", None) or {})
        if auto is not None and (custom or type(config) in auto._model_mapping):
            return auto
    raise CheckpointError(
        f"expected a model that transformers {transformers.__version__} can build for text, found model_type "
        f"{config.model_type!r}; use FILE.py:factory with your own module"
    )


def _widen(module: nn.Module) -> None:
    """Raise what transformers keeps in float32 to float64; tables computed in float32 keep their values."""
    for part in module.modules():
        for name, value in [*part._parameters.items(), *part._buffers.items()]:
            if value is not None and value.dtype is torch.float32:
                (part._parameters if name in part._parameters else part._buffers)[name] = _as_double(value)


def _as_double(value: torch.Tensor) -> Any:
    wide = value.detach().double()
    return nn.Parameter(wide, requires_grad=False) if isinstance(value, nn.Parameter) else wide
