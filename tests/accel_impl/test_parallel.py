from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accel_runs import furthest, setup_of, whole

import accel_impl
from accel_impl import model, ops
from accel_impl.parallel import Fleet, Place, check_layout, shares
from harness.errors import PortError, UsageError
from harness.recorder import Pins, TraceRecorder
from harness.types import Case, Layout

ROOT = Path(__file__).parents[2]
LAYOUTS = [Layout(tp=2), Layout(ep=2), Layout(pp=2), Layout(tp=2, ep=2), Layout(tp=2, pp=2)]


def simulated(port: Any, layout: Layout, case: Case, recorder: TraceRecorder | None = None) -> TraceRecorder:
    recorder = recorder or TraceRecorder()
    inputs = port.prepare(case, recorder)
    recorder.span(0, inputs.token_ids.shape[1])
    port.simulate(layout, inputs, recorder)
    return recorder


def test_shares_never_split_a_block() -> None:
    """Heads, experts and blocks go whole, the larger share first: 5 as 3 + 2, 7 as 4 + 3, 96 as 64 + 32."""
    assert shares(5, 2) == [range(3), range(3, 5)]
    assert shares(7, 2) == [range(4), range(4, 7)]
    assert shares(96, 2, unit=32) == [range(64), range(64, 96)]
    assert shares(224, 2, unit=128) == [range(128), range(128, 224)]
    assert shares(263, 2) == [range(132), range(132, 263)]
    with pytest.raises(UsageError, match="at least 3 blocks of 128"):
        shares(224, 3, unit=128)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_simulated_layout_equals_one_card(opened: Any, pictures: Case, layout: Layout) -> None:
    """All ranks in threads record every tap as one card does, pictures included."""
    port = opened()
    assert furthest(simulated(port, layout, pictures), whole(port, pictures)) < (2e-5, "")


def test_a_simulated_layout_can_be_replayed(opened: Any, text: Case) -> None:
    """Values put in by the recorder reach every rank, so a replay of tp2 stays a replay on its second rank too."""
    port = opened()
    free = whole(port, text)
    other = {n: v * 1.5 if n == "layers.1.attn.q_norm" else v for n, v in free.tensors().items()}
    pins = Pins(tensors=other, taps=free.taps, level=3, dtype=torch.float32, decisions=True)
    one = whole(port, text, TraceRecorder(pins=pins))
    assert furthest(simulated(port, Layout(tp=2), text, TraceRecorder(pins=pins)), one) < (2e-5, "")


def first_moved(port: Any, layout: Layout, case: Case) -> str:
    actual, expected = simulated(port, layout, case).tensors(), whole(port, case).tensors()
    for name, value in expected.items():
        if value.is_floating_point() and not torch.allclose(actual[name], value, atol=1e-4, rtol=1e-3):
            return name
    return ""


@pytest.mark.parametrize(
    ("fault", "layout", "place"),
    [
        ("no reduce", Layout(tp=2), "layers.0.attn"),
        ("no expert reduce", Layout(ep=2), "layers.1.moe.experts"),
        ("bias on every rank", Layout(tp=2), "vision.blocks.0"),
        ("sinks of rank 0", Layout(tp=2), "layers.3.attn.core"),
        ("stale hidden", Layout(pp=2), "layers.4.attn_mix"),
    ],
)
def test_a_fault_of_one_layout_is_seen_where_it_is(
    checkpoint: Path,
    pictures: Case,
    text: Case,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    layout: Layout,
    place: str,
) -> None:
    """Each usual mistake of a split moves the tap that it sits in first, and leaves one card as it was."""
    port = accel_impl.adapter(checkpoint, setup_of("float32"))
    port.load(checkpoint, setup_of("float32"))
    case = pictures if place.startswith("vision") else text
    assert first_moved(port, layout, case) == ""
    inject(fault, port, monkeypatch, layout)
    assert first_moved(port, layout, case) == place


def inject(fault: str, port: Any, monkeypatch: pytest.MonkeyPatch, layout: Layout) -> None:
    models = port._simulated[layout][1]
    if fault == "no reduce":
        monkeypatch.setattr(Place, "reduce", lambda self, partial: partial)
    elif fault == "no expert reduce":
        monkeypatch.setattr(Place, "reduce_experts", lambda self, partial: partial)
    elif fault == "stale hidden":
        take = Place.take_over
        monkeypatch.setattr(Place, "take_over", lambda self, s, d: take(self, s, d).roll(1, dims=-2))
    elif fault == "sinks of rank 0":
        sinks = [m.weights["model.layers.3.self_attn.sinks"].tensor for m in models]
        sinks[1].copy_(sinks[0][: len(sinks[1])])
    else:
        linear = ops.linear

        def biased(use: Any, x: Any, weight: Any, bias: Any = None, *, out: Any = None) -> Any:
            y = linear(use, x, weight, bias, out=out)
            names = [n for n, w in models[0].weights.items() if w is weight and "attn.proj" in n]
            names += [n for n, w in models[1].weights.items() if w is weight and "attn.proj" in n]
            if names and out is not None:
                y = y + models[0].weights[names[0].replace("weight", "bias")].tensor
            return y

        monkeypatch.setattr(ops, "linear", biased)


def test_a_rank_that_raises_ends_all_of_them(opened: Any, text: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """When one rank fails the others stop waiting, the error names it, and the next simulation works again."""
    port = opened()
    moe = model.experts

    def failing(held: Any, *args: Any) -> Any:
        if held.place.rank == 1 and held.place.layout.tp == 2:
            raise ValueError("boom")
        return moe(held, *args)

    monkeypatch.setattr(model, "experts", failing)
    with pytest.raises(PortError, match="rank 1 of tp2: ValueError: boom"):
        simulated(port, Layout(tp=2), text)
    monkeypatch.undo()
    assert furthest(simulated(port, Layout(tp=2), text), whole(port, text)) < (2e-5, "")


def test_unknown_layouts_are_refused() -> None:
    """Sequence parallelism, and different degrees of tp and ep, are usage errors."""
    with pytest.raises(UsageError, match="sp = 1"):
        check_layout(Layout(sp=2))
    with pytest.raises(UsageError, match="tp = ep"):
        check_layout(Layout(tp=2, ep=4))


def test_ranks_hold_less_than_one_card(checkpoint: Path, opened: Any) -> None:
    """The ranks of a layout together hold every expert once, and each holds less than a single card does."""
    port = opened()
    for layout in LAYOUTS[:3]:
        fleet = Fleet(layout)
        held = [port._loaded(fleet.place(rank)) for rank in range(2)]
        single = sum(w.nbytes for w in port.model.weights.values())
        assert all(rank.facts["resident_bytes"] < single for rank in held)
        experts = [sum(w.q.numel() for n, w in r.weights.items() if ".experts." in n) for r in held]
        assert sum(experts) == 8 * 12 * 3 * 96 * 160


_RANK = """
import json, os, sys
import torch, torch.distributed as dist
torch.set_num_threads(1)
import accel_impl
from harness.adapter import silent
from harness.types import Case, Layout, Setup
from pathlib import Path
dist.init_process_group("gloo")
checkpoint, found = Path(sys.argv[1]), {}
setup = Setup(side="accel", role="accel", adapter="builtin:accel", dtype="float32")
for layout in (Layout(), Layout(tp=2), Layout(ep=2), Layout(pp=2)):
    port = accel_impl.adapter(checkpoint, setup)
    port.distribute(layout)
    port.load(checkpoint, setup)
    inputs = port.prepare(Case(id="x", token_ids=tuple(range(40, 59))), silent)
    logits = port.forward(inputs, silent)
    found[str(layout)] = [logits.tolist(), port.generate(inputs, 3, silent)]
    port.close()
    dist.barrier()
Path(sys.argv[2], f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
"""


def test_real_ranks_equal_one_card(checkpoint: Path, opened: Any, tmp_path: Path) -> None:
    """Two gloo ranks give the logits and the tokens of one card in every layout; a rank outside a layout is idle."""
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    words = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    command = [sys.executable, *words, str(script), str(checkpoint), str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    ranks = [json.loads((tmp_path / f"rank{r}.json").read_text()) for r in range(2)]
    expected, ids = ranks[0].pop("single")
    assert ranks[1].pop("single") == [[[[] for _ in range(19)]], []]
    for found in ranks:
        for logits, tokens in found.values():
            torch.testing.assert_close(torch.tensor(logits), torch.tensor(expected), atol=1e-4, rtol=1e-4)
            assert tokens == ids
