"""The built-in checkpoint and loaded references, made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import reference_impl
from harness.types import Setup
from reference_impl.maker import ensure
from reference_impl.port import ReferenceAdapter

Load = Callable[[str], ReferenceAdapter]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep tiny products on one thread: waking others costs more than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure(tmp_path_factory.mktemp("cache") / "builtin")


@pytest.fixture(scope="session")
def load(checkpoint: Path) -> Load:
    loaded: dict[str, ReferenceAdapter] = {}

    def get(dtype: str) -> ReferenceAdapter:
        if dtype not in loaded:
            setup = Setup(side="reference", role="oracle", adapter="builtin:reference", dtype=dtype)
            loaded[dtype] = reference_impl.adapter(checkpoint, setup)
            loaded[dtype].load(checkpoint, setup)
        return loaded[dtype]

    return get


@pytest.fixture
def port(load: Load) -> ReferenceAdapter:
    return load("float32")
