"""Plans of memory, from headers alone."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from harness.checkpoint import memory_plan, open_checkpoint, window_plan


def test_a_window_is_two_neighbours_and_one_put_together(tmp_path: Path) -> None:
    """What streams needs the widest two units that follow each other, and the widest once more; not the model."""
    sizes = {"a": 4, "b": 64, "c": 8, "d": 32, "e": 16}
    save_file(
        {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in sizes.items()}, tmp_path / "m.safetensors"
    )
    checkpoint = open_checkpoint(tmp_path / "m.safetensors")
    plan = window_plan(checkpoint, "float32", [[name] for name in sizes])
    assert plan.stored_bytes == 2 * (64 + 8)
    assert plan.resident_bytes == 4 * (64 + 8)
    assert plan.transient_bytes == 4 * 64
    assert plan.resident_bytes < memory_plan(checkpoint, "float32").resident_bytes == 4 * sum(sizes.values())


def test_the_last_unit_is_followed_by_the_first(tmp_path: Path) -> None:
    """While the head computes, the first layer of the next walk is made."""
    save_file({name: torch.zeros(8) for name in "abc"}, tmp_path / "m.safetensors")
    plan = window_plan(open_checkpoint(tmp_path / "m.safetensors"), "float32", [["a", "b"], [], ["c"]])
    assert plan.stored_bytes == 4 * 8 * 3
