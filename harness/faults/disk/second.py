"""What transformers says of the same folder: an error, a warning, nothing. Knows transformers; must not know damages.

The weights that it ends up with are held against those of the right folder: silence is told from harmlessness.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

UNSUPPORTED = "cannot load"


class SecondOpinion:
    """A loader that was shown the right folder once: what it says of that is not counted, and it must load it."""

    def __init__(self, clean: Path) -> None:
        self.unsupported, self._right, self._usual = "", dict[str, torch.Tensor](), set[str]()
        try:
            self._right, self._usual = _loaded(clean)
        except Exception as error:  # whatever another loader raises
            self.unsupported = f"{type(error).__name__}: {error}"[:200]

    def __call__(self, folder: Path) -> str:
        """Return `error`, `warning` (something was said), `silent` (other weights, nothing said) or `same`."""
        if self.unsupported:
            return UNSUPPORTED
        try:
            found, said = _loaded(folder)
        except Exception:  # whatever another loader raises
            return "error"
        if said - self._usual:
            return "warning"
        same = found.keys() == self._right.keys() and all(_equal(found[n], self._right[n]) for n in found)
        return "same" if same else "silent"


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def _loaded(folder: Path) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Return the weights that transformers makes of a folder, dequantised where it can, and what it said."""
    import transformers

    log = logging.getLogger("transformers")
    before, others, spreads = log.level, list(log.handlers), log.propagate
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setLevel(logging.WARNING)
    transformers.utils.logging.set_verbosity_warning()
    log.handlers, log.propagate = [handler], False
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype="auto", output_loading_info=True, **_dequantised(folder)
            )
    finally:
        log.handlers, log.propagate = others, spreads
        log.setLevel(before)
    keys = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs", "conversion_errors")
    told = [f"{key}: {sorted(map(str, value))}" for key in keys if (value := info.get(key))]
    words = [*told, *(x for x in stream.getvalue().splitlines() if x.strip()), *(str(w.message) for w in caught)]
    return {n: p.detach() for n, p in model.state_dict().items()}, {w.replace(str(folder), "") for w in words}


def _dequantised(folder: Path) -> dict[str, Any]:
    """Return what makes a processor without small floats multiply weights out."""
    import json

    import transformers

    method = json.loads((folder / "config.json").read_text()).get("quantization_config", {}).get("quant_method", "")
    makers: dict[str, Callable[[], Any]] = {
        "mxfp4": lambda: transformers.Mxfp4Config(dequantize=True),
        "fp8": lambda: transformers.FineGrainedFP8Config(dequantize=True),
    }
    return {"quantization_config": makers[method]()} if method in makers else {}
