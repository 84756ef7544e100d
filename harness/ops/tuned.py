"""Every configuration that an autotuner may choose, as an implementation of its own. Knows no kernel language.

A tuned kernel is an object with `configs` and a `cache` of choices (Triton's Autotuner is one); with one configuration
left and nothing remembered, the kernel has no choice. A port may list variants as functions instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from harness.errors import PortError
from harness.ops.offered import Offered


def variants_of(
    offered: Offered, kernel: Any = None, variants: Mapping[str, Callable[..., Any]] | None = None
) -> list[Offered]:
    """Return an implementation as it is, then one for each configuration of its kernel and for each listed variant."""
    found = [offered]
    for config in tuple(getattr(kernel, "configs", ())) if kernel is not None else ():
        found.append(replace(offered, call=_pinned(offered.call, kernel, config), variant=_words(config)))
    if kernel is not None and len(found) == 1:
        raise PortError(
            f"operator {offered.name}: expected a kernel with a list `configs` that is not empty, found "
            f"{type(kernel).__name__}; hand over the autotuner itself, or list the variants as functions"
        )
    return found + [replace(offered, call=call, variant=name) for name, call in (variants or {}).items()]


def _pinned(call: Callable[..., Any], kernel: Any, config: Any) -> Callable[..., Any]:
    def pinned(*args: Any, **kwargs: Any) -> Any:
        with _only(kernel, config):
            return call(*args, **kwargs)

    return pinned


@contextmanager
def _only(kernel: Any, config: Any) -> Iterator[None]:
    """Leave a kernel one configuration to choose, and what it remembers as it was afterwards."""
    configs, cache = kernel.configs, dict(getattr(kernel, "cache", {}))
    kernel.configs = [config]
    if hasattr(kernel, "cache"):
        kernel.cache.clear()
    try:
        yield
    finally:
        kernel.configs = configs
        if hasattr(kernel, "cache"):
            kernel.cache.clear()
            kernel.cache.update(cache)


def _words(config: Any) -> str:
    """Return a configuration in words: its keywords, warps and stages where it has them."""
    known = {**getattr(config, "kwargs", {})}
    for name in ("num_warps", "num_stages", "num_ctas"):
        if getattr(config, name, None) is not None:
            known[name] = getattr(config, name)
    return ", ".join(f"{k}={v}" for k, v in known.items()) or str(config)
