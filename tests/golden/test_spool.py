"""What a run records can lie in files while it runs."""

from pathlib import Path

import torch

from harness.golden import Spool


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def test_a_copy_is_the_value_and_nobody_elses_memory(tmp_path: Path) -> None:
    """Copies of any dtype, layout and size hold the bits, contiguous, whatever becomes of what was copied."""
    spool = Spool(tmp_path)
    for dtype in (torch.bfloat16, torch.float64, torch.int64, torch.bool):
        for shape in ((), (3,), (700, 33), (0, 4)):
            value = (torch.randn(shape) * 9).to(dtype)
            for source in (value, value.t() if value.dim() == 2 else value):
                kept, expected = spool.keep(source), source.clone()
                source.zero_()
                assert torch.equal(kept, expected)
                assert kept.is_contiguous()
                assert kept.dtype is dtype
                source.copy_(expected)
    assert list(tmp_path.iterdir()) == []


def test_what_is_kept_is_not_anonymous_memory(tmp_path: Path) -> None:
    """Keeping 64 MB grows the memory that the system cannot take back by a small part of that."""
    spool, value = Spool(tmp_path), torch.ones(1 << 20)
    before = anonymous_bytes()
    kept = [spool.keep(value) for _ in range(16)]
    assert anonymous_bytes() - before < 16 << 20
    assert all(torch.equal(each, value) for each in kept)
