"""What torch expects under `torch.pocket`: cards, random state. Knows torch.accelerator; must not know kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def is_available() -> bool:
    """Say that the device is there: this module is only registered then."""
    return True


def is_initialized() -> bool:
    """Say that nothing has to be initialised."""
    return True


def device_count() -> int:
    """Return the number of cards."""
    from accel_impl.device import held

    return int(held().pocket_count())


def current_device() -> int:
    """Return the index of the current card."""
    return torch.accelerator.current_device_index()


def set_device(card: int) -> None:
    """Make a card the current one."""
    torch.accelerator.set_device_index(card)


def synchronize(card: int | None = None) -> None:
    """Wait for copies from pinned memory; everything else is done when it is called."""
    torch.accelerator.synchronize(current_device() if card is None else card)


def get_device_name(card: int | None = None) -> str:
    """Return the card's name."""
    return "pocket (host memory, own matrix product, softmax, top-k, copies; the rest on the CPU)"


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that autocast may use."""
    return [torch.bfloat16, torch.float16, torch.float32]


def manual_seed(seed: int) -> None:
    """Do nothing: random numbers are drawn by the CPU, whose generator torch seeds beside this."""


manual_seed_all = manual_seed


def get_rng_state(device: int | str | torch.device = NotImplemented) -> Tensor:
    """Return the state of the generator that draws for the device, the CPU's."""
    return torch.get_rng_state()


def set_rng_state(state: Tensor, device: int | str | torch.device = NotImplemented) -> None:
    """Set the state of the CPU's generator."""
    torch.set_rng_state(state)


def _is_in_bad_fork() -> bool:
    return False
