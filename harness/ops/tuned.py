"""Every configuration that an autotuner may choose, as an implementation of its own. Imports no kernel language.

A tuned kernel is an object with `configs` and a `cache` of choices (Triton's Autotuner is one, also inside of other
decorators); with one configuration left and nothing remembered, the kernel has no choice. One that prunes
(`prune_configs`) does not admit every configuration for every input: where it would not, what it admits runs instead. A
port may list variants as functions instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from harness.errors import PortError
from harness.ops.offered import Offered


def variants_of(
    offered: Offered, kernel: Any = None, variants: Mapping[str, Callable[..., Any]] | None = None
) -> list[Offered]:
    """Return an implementation as it is, then one for each configuration of its kernel and for each listed variant."""
    tuner = _tuner(kernel)
    configs = tuple(getattr(tuner, "configs", ()))
    found = [replace(offered, call=_pinned(offered.call, tuner, c), variant=_words(c)) for c in configs]
    if not (configs and _cannot_measure(tuner)):
        found = [offered, *found]
    if kernel is not None and not configs:
        raise PortError(
            f"operator {offered.name}: expected a kernel with a list `configs` that is not empty, found "
            f"{type(kernel).__name__}; hand over the autotuner itself, or list the variants as functions"
        )
    return found + [replace(offered, call=call, variant=name) for name, call in (variants or {}).items()]


def _tuner(kernel: Any) -> Any:
    """Return the autotuner among decorators around a kernel, each of which has the next one as `fn`."""
    seen = kernel
    while seen is not None and not getattr(seen, "configs", None) and hasattr(seen, "fn"):
        seen = seen.fn
    return seen if getattr(seen, "configs", None) else kernel


def _cannot_measure(tuner: Any) -> bool:
    """Say whether a kernel runs interpreted: without a device nothing is measured, so nothing can be chosen."""
    inner = tuner
    while hasattr(inner, "fn"):
        inner = inner.fn
        if "Interpreted" in type(inner).__name__:
            return len(tuner.configs) > 1 and not torch.accelerator.is_available()
    return False


def _pinned(call: Callable[..., Any], kernel: Any, config: Any) -> Callable[..., Any]:
    def pinned(*args: Any, **kwargs: Any) -> Any:
        with _only(kernel, config):
            return call(*args, **kwargs)

    return pinned


@contextmanager
def _only(kernel: Any, config: Any) -> Iterator[None]:
    """Leave a kernel one configuration to choose, and what it remembers as it was afterwards."""
    configs, cache = kernel.configs, dict(getattr(kernel, "cache", {}))
    run, prune = getattr(kernel, "run", None), getattr(kernel, "prune_configs", None)
    kernel.configs = [config]
    if hasattr(kernel, "cache"):
        kernel.cache.clear()
    if run is not None and prune is not None:
        kernel.run = _admitted(kernel, run, prune, configs, config)
    try:
        yield
    finally:
        kernel.configs = configs
        if "run" in vars(kernel):
            del kernel.run
        if hasattr(kernel, "cache"):
            kernel.cache.clear()
            kernel.cache.update(cache)


def _admitted(kernel: Any, run: Any, prune: Any, configs: Any, config: Any) -> Callable[..., Any]:
    """Return a kernel's `run` that asks first which of all configurations it admits for an input, fast or slow."""
    model = getattr(kernel, "perf_model", None)

    def asked(*args: Any, **kwargs: Any) -> Any:
        kernel.nargs = dict(zip(getattr(kernel, "arg_names", ()), args, strict=False))
        kernel.configs, kernel.perf_model = configs, None
        try:
            kept = list(prune(kwargs))
        finally:
            kernel.perf_model = model
        kernel.configs = [config] if config in kept or not kept else kept[:1]
        return run(*args, **kwargs)

    return asked


def _words(config: Any) -> str:
    """Return a configuration in words: its keywords, warps and stages where it has them."""
    known = {**getattr(config, "kwargs", {})}
    for name in ("num_warps", "num_stages", "num_ctas"):
        if getattr(config, name, None) is not None:
            known[name] = getattr(config, name)
    return ", ".join(f"{k}={v}" for k, v in known.items()) or str(config)
