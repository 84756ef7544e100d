"""Traces at rest, and what travels with them."""

from harness.golden.carried import Carried, checkpoint_digest, choose_carried, load_carried, save_carried
from harness.golden.ranks import load_recordings, merge_ranks
from harness.golden.spool import Spool
from harness.golden.store import (
    FORMAT,
    LazyTensors,
    load_failure,
    load_trace,
    read_manifest,
    save_failure,
    save_trace,
)

__all__ = [
    "FORMAT",
    "Carried",
    "LazyTensors",
    "Spool",
    "checkpoint_digest",
    "choose_carried",
    "load_carried",
    "load_failure",
    "load_recordings",
    "load_trace",
    "merge_ranks",
    "read_manifest",
    "save_carried",
    "save_failure",
    "save_trace",
]
