"""Make many small records at once. Knows the interpreter; must not know checkpoints."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def many_records() -> Iterator[None]:
    """Make half a million records without the garbage collector, which would walk all of them again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()  # all that is new counts as old at once, without being walked
            gc.enable()
            gc.unfreeze()
