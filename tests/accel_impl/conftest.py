"""The built-in checkpoint and loaded ports, made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accel_runs import setup_of

import accel_impl
import reference_impl
from accel_impl.port import AccelAdapter
from harness.cases import ModelInfo, image_case, read_model_info, text_case
from harness.types import Case

Open = Callable[..., AccelAdapter]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep tiny products on one thread: waking others costs more than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    return reference_impl.checkpoint()


@pytest.fixture(scope="session")
def info(checkpoint: Path) -> ModelInfo:
    return read_model_info(checkpoint)


@pytest.fixture(scope="session")
def opened(checkpoint: Path) -> Iterator[Open]:
    """Give a loaded port for a dtype and options; the same one for the same words."""
    ports: dict[tuple[Any, ...], AccelAdapter] = {}

    def get(dtype: str = "float32", **options: str) -> AccelAdapter:
        key = (dtype, *sorted(options.items()))
        if key not in ports:
            setup = setup_of(dtype, **options)
            ports[key] = accel_impl.adapter(checkpoint, setup)
            ports[key].load(checkpoint, setup)
        return ports[key]

    yield get
    for port in ports.values():
        port.close()


@pytest.fixture(scope="session")
def text(info: ModelInfo) -> Case:
    return text_case(info, 19)


@pytest.fixture(scope="session")
def pictures(info: ModelInfo) -> Case:
    return image_case(info, [(48, 32), (16, 64)])
