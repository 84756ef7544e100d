"""Traces at rest."""

from harness.golden.store import (
    LazyTensors,
    load_failure,
    load_trace,
    read_manifest,
    save_failure,
    save_trace,
)

__all__ = ["LazyTensors", "load_failure", "load_trace", "read_manifest", "save_failure", "save_trace"]
