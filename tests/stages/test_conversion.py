"""A port that converts weights as it loads them keeps its promise, or the load stage says where it does not."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import reference_impl
from accel_impl import formats, loader
from accel_impl.port import AccelAdapter
from harness.checklist import load_checklists
from harness.checkpoint import open_checkpoint
from harness.checkpoint.cut import plan_cut, write_cut
from harness.conversion import Watermark, conversion_facts
from harness.gate import judge
from harness.runs import Bench, execute
from harness.stages import StageContext, load
from harness.stages.conversion import conversion_of
from harness.types import Measurement, Run, Scope, Setup, Status

SETUP = Setup(side="accel", role="accel", adapter="builtin:accel", dtype="bfloat16", options={"pages": "8"})
RUN = Run(id=load.CONVERSION, stage="load", kind="conversion")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Return two layers of the built-in checkpoint: one dense, one of experts."""
    folder = tmp_path_factory.mktemp("cut") / "builtin"
    write_cut(plan_cut(open_checkpoint(reference_impl.checkpoint()), (0, 1)), folder)
    return folder


def measured(checkpoint: Path, port: Any = None) -> list[Measurement]:
    """Load a port and measure its conversion as the load stage does."""
    port = port or AccelAdapter(checkpoint, SETUP)
    port.load(checkpoint, SETUP)
    bench = Bench(adapter=port, setup=SETUP, checkpoint=checkpoint, load_facts={}, beat=lambda _: None)
    trace = execute(bench, RUN, pins=None, expected=None)
    port.close()
    return conversion_of(RUN, trace.facts)


def broken(measurements: list[Measurement]) -> set[str]:
    """Return the ids of the criteria that do not hold."""
    criteria = [c for c in load_checklists().by_stage["load"] if c.id.startswith("load.conversion")]
    verdicts, unjudged = judge(
        criteria=criteria, measurements=measurements, in_scope=lambda _: "", waivers=(), today=None,
    )  # fmt: skip
    assert unjudged == []
    return {v.criterion.id for v in verdicts if v.status is not Status.PASSED}


def named(measurements: list[Measurement], metric: str) -> list[Measurement]:
    return [m for m in measurements if m.metric == metric]


def test_the_built_in_port_keeps_its_promise(checkpoint):
    """Two orders, the workspace poisoned: the same bytes, within what was promised, and nothing kept."""
    found = measured(checkpoint)
    assert broken(found) == set()
    for m in named(found, "conversion_peak_over_promise"):
        assert m.detail["peak_bytes"] == m.detail["reported_peak_bytes"]  # its own count is the one that is seen
        assert m.detail["left_bytes"] == 0
        assert 0.5 < m.value <= 1


def test_a_stale_tail_of_a_larger_matrix_is_seen(checkpoint, monkeypatch):
    """A workspace whose last rows are not overwritten gives weights that depend on what lay there: each is named."""
    decode = formats.decode_mxfp4

    def forgetful(packed: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        decode(packed[:-1], scale[:-1], out[:-1])
        return out

    monkeypatch.setattr(formats, "decode_mxfp4", forgetful)
    found = measured(checkpoint)
    assert broken(found) == {"load.conversion.same"}
    changed = named(found, "conversion_mismatches")
    assert changed[0].subject.startswith("model.layers.")
    assert ".experts." in changed[0].subject
    assert "NaN, as the workspace was" in changed[0].detail["message"]


def test_leftovers_are_seen_where_poison_does_not_reach(checkpoint, monkeypatch):
    """A second buffer that no poison fills still shows: it holds another matrix where layers are visited in reverse."""
    decode, buffer = formats.decode_mxfp4, torch.zeros(1 << 16)

    def through(packed: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        mine = buffer[: out.numel()].view(out.shape)
        decode(packed[:-1], scale[:-1], mine[:-1])
        return out.copy_(mine)

    monkeypatch.setattr(formats, "decode_mxfp4", through)
    assert broken(measured(checkpoint)) == {"load.conversion.same"}


def test_a_packed_original_that_is_kept_is_named(checkpoint, monkeypatch):
    """One list that keeps what was read keeps all of it: each original is named with its file, and memory shows it."""
    kept: list[Any] = []
    read = loader.Shards.read

    def keeping(self: Any, name: str) -> torch.Tensor:
        kept.append(read(self, name))
        return kept[-1]

    monkeypatch.setattr(loader.Shards, "read", keeping)
    found = measured(checkpoint)
    assert broken(found) == {"load.conversion.released", "load.conversion.memory"}
    first = named(found, "packed_originals_kept")[0]
    assert "is still in memory as model" in first.detail["message"]
    assert first.detail["bytes"] > 0


def test_a_few_kept_originals_are_named_though_memory_has_room_for_them(checkpoint, monkeypatch):
    """One matrix that stays packed is within the promise's bytes, and is named nevertheless."""
    kept: list[Any] = []
    convert = loader.convert_expert

    def keeping(param: Any, raw: Any, workspace: Any) -> Any:
        if param.name == "model.layers.1.mlp.experts.3.up_proj.weight":
            kept.append(raw)
        return convert(param, raw, workspace)

    monkeypatch.setattr(loader, "convert_expert", keeping)
    found = measured(checkpoint)
    assert broken(found) == {"load.conversion.released"}
    names = {m.subject for m in named(found, "packed_originals_kept")}
    stem = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert names <= {f"{stem}_packed", f"{stem}_scale"}
    assert f"{stem}_packed" in names


def test_a_workspace_for_each_layer_breaks_the_promise(checkpoint, monkeypatch):
    """Workspaces that stay, one for each layer, are more than the one that was promised."""
    take, spaces = loader.Workspace.take, []

    def another(self: Any, rows: int, cols: int) -> torch.Tensor:
        spaces.append(torch.empty_like(self.buffer))
        return take(loader.Workspace(buffer=spaces[-1], use=self.use, poison=self.poison), rows, cols)

    monkeypatch.setattr(loader.Workspace, "take", another)
    assert broken(measured(checkpoint)) == {"load.conversion.memory"}


def test_a_port_cannot_promise_itself_a_workspace_of_any_size(checkpoint):
    """A workspace counts as promised up to the largest layer in float32, whatever the port says."""

    class Boastful(AccelAdapter):
        def reload(self, *, reverse: bool, poison: bool) -> Any:
            facts = super().reload(reverse=reverse, poison=poison)
            waste = [torch.zeros(20 << 20)]
            del waste
            return {**facts, "workspace_bytes": 1 << 40}

    assert broken(measured(checkpoint, Boastful(checkpoint, SETUP))) == {"load.conversion.memory"}


def test_memory_that_no_tensor_shows_is_seen_in_the_process(checkpoint):
    """What a port takes outside of torch is seen as memory of the process, and what it dropped first is not."""

    class Native(AccelAdapter):
        def reload(self, *, reverse: bool, poison: bool) -> Any:
            facts = super().reload(reverse=reverse, poison=poison)
            self.waste = bytearray(b"x" * (400 << 20))
            time.sleep(0.05)
            return facts

    port = Native(checkpoint, SETUP)
    assert broken(measured(checkpoint, port)) == {"load.conversion.memory"}
    load_again = [m.detail["process_peak_bytes"] for m in named(measured(checkpoint), "conversion_peak_over_promise")]
    assert max(load_again) < 256 << 20


def test_a_larger_strip_is_harmless(checkpoint, monkeypatch):
    """How many rows are converted at once is nobody's business as long as the promise holds."""
    monkeypatch.setattr(formats, "STRIP_ROWS", 200)
    assert broken(measured(checkpoint)) == set()


def test_a_device_that_counts_what_was_freed_is_to_blame_itself(checkpoint):
    """The peak of a device that counts freed memory says nothing of a port: the finding names the runtime."""
    port = AccelAdapter(checkpoint, SETUP)
    port.load(checkpoint, SETUP)
    facts = dict(conversion_facts(port, checkpoint, lambda _: None))
    assert facts["stays_counted_bytes"] == 0
    facts["loads"] = [{**told, "peak_bytes": 10 * told["peak_bytes"]} for told in facts["loads"]]
    subjects = [named(conversion_of(RUN, {**facts, **more}), "conversion_peak_over_promise")[0].subject for more in (
        {}, {"stays_counted_bytes": 16384},
    )]  # fmt: skip
    assert subjects == [facts["loads"][0]["how"], "runtime.allocated"]


def test_a_port_that_does_not_convert_is_not_judged():
    """Without the capability nothing is planned, and the criteria are out of scope with the reason."""

    def kinds(*capabilities: str) -> list[str]:
        context = StageContext(
            info=None, scope=Scope(), capabilities=frozenset(capabilities), reference_capabilities=frozenset(),
            profile="quick", dtype="bfloat16",
        )  # fmt: skip
        return [run.kind for run in load.plan(context)]

    assert "conversion" not in kinds("weights")
    assert "conversion" in kinds("weights", "converts")


def test_storages_are_counted_while_they_live():
    """The mark sees what is made within, views once, what lies in foreign memory, and what has died."""
    outside = torch.ones(1000)
    with Watermark() as mark:
        a = torch.zeros(1000)
        b = a.view(10, 100)[:5]
        assert mark.bytes == 4000
        outside + 1  # a result that nobody keeps
        assert (mark.bytes, mark.peak) == (4000, 8000)
        c = torch.frombuffer(bytearray(2000), dtype=torch.uint8).view(torch.float32)
        assert mark.bytes == 6000
        del a
        gc.collect()
        assert mark.bytes == 6000
        del b, c
    gc.collect()
    assert (mark.bytes, mark.peak, mark.alive) == (0, 8000, {})
