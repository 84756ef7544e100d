"""Small models that tests of one session share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from harness.adapters.module import ModuleAdapter
from harness.faults import models
from harness.types import Setup

Opener = Callable[..., ModuleAdapter]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small operations only wait for each other on more threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opener:
    """Open (once a session) the adapter of a small model: `opened("llama", "bfloat16", attn="eager")`."""
    from harness.adapters.hf import hf_adapter

    root = tmp_path_factory.mktemp("tiny")
    made: dict[tuple[str, ...], ModuleAdapter] = {}

    def open_(name: str, dtype: str = "float32", **options: str) -> ModuleAdapter:
        key = (name, dtype, *(f"{k}={v}" for k, v in sorted(options.items())))
        if key not in made:
            folder = models.build(name, root / name)
            setup = Setup(side="accel", role="accel", adapter=f"hf:{folder}", dtype=dtype, options=options)
            made[key] = hf_adapter(folder, setup)
            made[key].load(Path(folder), setup)
        return made[key]

    return open_
