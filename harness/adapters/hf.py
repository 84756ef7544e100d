"""Any transformers text or image-text checkpoint folder as an adapter. Knows transformers (lazily); no model class.

    hf:PATH?attn=eager&experts=eager&compile=aot_eager&trust_remote_code=1

The model is loaded in its precision (never cast afterwards, which would round rotary tables too); parameters that
transformers keeps in float32 stay there, or become float64 for a float64 oracle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.adapters.module import Loaded, ModuleAdapter
from harness.errors import CheckpointError, SpecError
from harness.types import Setup

OPTIONS = ("attn", "experts", "trust_remote_code")


def hf_adapter(checkpoint: Path, setup: Setup) -> ModuleAdapter:
    """Return the adapter of a checkpoint folder; nothing is loaded yet. Raises SpecError for an unknown option."""
    _transformers()
    return ModuleAdapter(load_module, checkpoint, setup, name=f"hf:{checkpoint.name}", options=OPTIONS, wide=True)


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
    module, info = _auto(transformers, config).from_pretrained(
        checkpoint, output_loading_info=True, local_files_only=True, use_safetensors=True, **given
    )
    if setup.dtype == "float64":
        _widen(module)
    module = module.to(setup.device)
    facts = {
        "unfilled": sorted(info["missing_keys"]),
        "unused": sorted(info["unexpected_keys"]),
        "mismatched": sorted(str(key) for key in info["mismatched_keys"]),
        "class": type(module).__name__,
        "attention": str(getattr(module.config, "_attn_implementation", "")),
        "experts": str(getattr(module.config, "_experts_implementation", "")),
    }
    return Loaded(module=module, facts=facts)


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
