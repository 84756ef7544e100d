"""The small device: cards, memory, counts; each defect named by the shadow on the operator that has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMPILER = os.environ.get("CXX") or "g++"
pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C++ compiler {COMPILER!r} to build it with")

BEGIN = """
import torch
from accel_impl import device
device.enable({"cards": "2", "gib": "0.25"})
from harness.shadow.mode import Shadow
from harness.shadow.places import Places
d = "pocket:1"
g = torch.Generator().manual_seed(0)
def draw(*shape): return torch.randn(*shape, generator=g)
def wrong(run, *breaks):
    device.set_breaks(breaks)
    with Shadow(Places(), budget_s=60) as shadow:
        run()
    device.set_breaks([])
    return {(o.removeprefix("aten::"), k) for o, k in shadow.found.wrong}
"""


def run(code: str) -> str:
    """Run code in a process of its own: a device is registered once for all, and other tests want a plain CPU."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_cards_count_their_memory_and_run_out_of_it():
    """Each card counts its own bytes, raises OutOfMemoryError above its cap, and goes on afterwards."""
    run("""
acc = torch.accelerator
assert acc.device_count() == 2 and acc.current_accelerator().type == "pocket"
x = torch.zeros(1 << 20, device=d)
assert acc.memory_allocated(1) == 4 << 20 and acc.memory_allocated(0) == 0
assert acc.get_memory_info(1) == ((1 << 28) - (4 << 20), 1 << 28)
try:
    torch.empty(1 << 28, device=d)
    raise SystemExit("was given")
except torch.OutOfMemoryError as error:
    assert "pocket:1" in str(error)
del x
assert acc.memory_allocated(1) == 0 and acc.max_memory_allocated(1) == 4 << 20
acc.reset_peak_memory_stats(1)
assert acc.max_memory_allocated(1) == 0
y = torch.arange(9, device=d)
assert y.device.index == y.untyped_storage().device.index == 1  # what grows, grows on its own card
""")


def test_what_the_device_lacks_runs_on_the_cpu_and_is_counted():
    """Own operators and fallbacks are told apart by name; tensors of two cards do not mix."""
    run("""
device.reset_counts()
x = draw(5, 70).to(d)
torch.erfinv(x)
x @ x.t()
counts = device.counts()
assert any("erfinv" in name for name in counts["fallback"]) and counts["own"]["mm"] == 1
for other in ("pocket:0", "cpu"):
    try:
        x + torch.ones(5, 70, device=other)
        raise SystemExit("mixed " + other)
    except RuntimeError:
        pass
""")


def test_pinned_copies_land_in_order():
    """A non-blocking copy from pinned memory lands late, but before synchronising returns; unless it is told not to."""
    run("""
for breaks, want in (((), 1.0), (("stale_pinned",), 2.0)):
    device.set_breaks(breaks)
    pinned, x = torch.ones(8).pin_memory(), torch.zeros(8, device=d)
    x.copy_(pinned, non_blocking=True)
    torch.accelerator.synchronize(1)
    pinned.fill_(2.0)
    assert x.cpu().eq(want).all(), (breaks, x.cpu())
""")


def test_each_defect_is_named_and_honest_rounding_is_silent():
    """The shadow names the operator that is wrong and no other; the device's own product, sums and copies pass."""
    run("""
a, b = draw(48, 130).to(d), draw(130, 33).to(d)
h = draw(3, 40, 65).to(torch.bfloat16).to(d)
bag = torch.zeros(6, 10, device=d)
def everything():
    a @ b, torch.addmm(draw(33).to(d), a, b), torch.bmm(h, h.transpose(1, 2))
    a[:, :40].softmax(-1), a.topk(5), a.cumsum(0), h.cumsum(1), torch.cat([a, a[:, :3]], 1), a.t().contiguous()
    bag[:, 2:5] = 1.5
    torch.nn.functional.layer_norm(h, (65,)), a.sum(), a.mean(0), a.argmax(), h.sort(-1), h.exp(), a.to(torch.bfloat16)
    torch.arange(7, device=d), bag.index_put_((torch.tensor([1, 1], device=d),), bag[2:4], accumulate=True)
assert wrong(everything) == set(), wrong(everything)
first = lambda *breaks: wrong(everything, *breaks)
assert first("topk_last") == {("topk", "bits")}
assert {n for n, _ in first("softmax_band")} == {"_softmax"}
assert {n for n, _ in first("matmul_tail")} == {"mm", "addmm", "bmm"}
assert {n for n, _ in first("cumsum_narrow")} == {"cumsum"}
assert {n for n, _ in first("strided_read")} >= {"clone"}
assert ("copy_", "neighbours") in first("blit_neighbours") or ("fill_", "neighbours") in first("blit_neighbours")
""")


def test_of_a_large_product_some_rows_and_columns_are_repeated():
    """A product that is too large is not left out: a part of it is repeated, silent where right, named where wrong."""
    run("""
from harness.shadow import mode
mode.MOST_WORK = 1000
x, w, bias = draw(40, 130).to(d), draw(70, 130).to(torch.float32).to(d), draw(70).to(d)
def products():
    torch.nn.functional.linear(x, w), torch.nn.functional.linear(x, w, bias), x @ w.t()
assert wrong(products) == set(), wrong(products)
assert wrong(products, "matmul_tail") == {("mm", "values"), ("addmm", "values")}
with Shadow(Places(), budget_s=60) as shadow:
    products()
tallies = shadow.found.tallies
assert tallies["aten::mm"].large and tallies["aten::mm"].compared == tallies["aten::mm"].large
device.set_breaks(["matmul_tail"])
with Shadow(Places(), budget_s=60) as shadow:
    products()
device.set_breaks([])
call = shadow.found.wrong["aten::mm", "values"]
assert call.part == "rows 0, 13, 26 ... 39 and columns 0, 1, 2 ... 69 of a larger product", call.part
""")


INSIDE = """
from torch import Tensor
@torch.library.custom_op("day0_device_tests::chosen", mutates_args=())
def chosen(x: Tensor, off: float) -> Tensor:
    best = torch.softmax(x.topk(40, dim=-1).values, -1)
    return best * (1 + off) if x.device.type == "pocket" else best * 1.0
"""


def test_inside_of_a_custom_operator_the_wrong_one_is_named():
    """The operator of torch inside is to blame, not the custom one around it; that is, where its parts are right."""
    run(
        INSIDE
        + """
x = draw(5, 70).to(d)
call = lambda off: wrong(lambda: chosen(x, off))
assert call(0.0) == set()
assert call(0.01) == {("day0_device_tests::chosen", "values")}
assert wrong(lambda: chosen(x, 0.0), "softmax_band") == {("_softmax", "values")}
assert wrong(lambda: chosen(x, 0.0), "topk_last") == {("topk", "bits")}
"""
    )


SAVED = """
import sys
from pathlib import Path
from accel_impl import kernels
from harness.shadow.calls import held
from harness.shadow.evidence import save
from harness.shadow.mode import Call
from harness.shadow.truth import Judged
def saved(operator, args, out, breaks):
    judged = Judged(kind=breaks or "right", ratio=None, wrong=1, count=out.numel())
    call = Call(operator=operator, overload="", args=list(map(held, args)), kwargs={}, outputs=(held(out),), number=1,
                judged=judged, module="", told=0, within="", site="", phase="")
    print(save(call, Path(PLACE), {"breaks": breaks}))
x, past, weight = draw(1, 9, 48).to(d)[..., ::2], draw(1, 3, 24).to(d), draw(24, 4).to(d)
bag, row = draw(6, 10).to(d), draw(6, 3).to(d)
for breaks in ("", "strided_read"):
    saved("day0_accel::causal_conv", (x, past, weight), kernels.causal_conv(x, past, weight), breaks)
for breaks in ("", "blit_neighbours"):
    saved("aten::copy_", (bag[:, 2:5], row), bag[:, 2:5].copy_(row), breaks)
"""


def test_calls_are_replayed_in_a_process_of_their_own(tmp_path: Path):
    """A custom operator brings its module along; right ones are told as right, wrong values and neighbours as wrong."""
    places = run(SAVED.replace("PLACE", repr(str(tmp_path)))).split()
    for place, code in zip(places, (0, 1, 0, 1), strict=True):
        again = subprocess.run(
            [sys.executable, str(Path(place) / "replay.py")], capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip
        assert again.returncode == code, again.stdout + again.stderr[-2000:]
        assert ("beside" in again.stdout) is ("blit" in place), again.stdout


def test_a_device_without_a_compiler_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without a compiler the error names what is missing and what to do."""
    from accel_impl.device.build import library
    from harness.errors import SpecError

    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.raises(SpecError, match=r"needs a C\+\+ compiler"):
        library()
