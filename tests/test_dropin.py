"""The recorder that is dropped into an engine's worker."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness import dropin
from harness.golden import load_recordings, load_trace

IDS = list(range(10, 21))


class Block(torch.nn.Module):
    """A block that gives two tensors, as engines that keep the residual apart do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.down(torch.relu(self.up(x))), x


class Model(torch.nn.Module):
    """An embedding, two blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(32, 8)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(8, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            y, x = block(x)
            x = x + y
        return self.head(x)


@pytest.fixture
def recorder(tmp_path):
    made = dropin.Recorder(tmp_path / "rec", names=["blocks.?", "blocks.?.out.1", "head"], about={"engine": "toy 1.0"})
    yield made
    made.close()


def recorded(recorder, request="r"):
    recorder.save()
    return load_trace(recorder.folder / request / f"rank-{recorder.rank}")


def test_it_needs_torch_and_the_standard_library_alone(tmp_path):
    """The file imports nothing else, and works copied to where day0 is not."""
    path = Path(dropin.__file__)
    tops = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    }
    assert tops <= {"torch", *sys.stdlib_module_names, "__future__"}
    (tmp_path / "dropin.py").write_text(path.read_text())
    code = (
        "import sys, torch; sys.modules['numpy'] = None; sys.modules['safetensors'] = None; "
        "from dropin import Recorder; r = Recorder('out', names=['*']); r.tokens('a', range(3), ids=[1, 2, 3]); "
        "r.tap('x', torch.ones(3, 2, dtype=torch.bfloat16)); r.close()"
    )
    subprocess.run(
        [sys.executable, "-I", "-c", "import sys; sys.path.insert(0, '.'); " + code], cwd=tmp_path, check=True
    )
    trace = load_trace(tmp_path / "out" / "a" / "rank-0")
    assert trace.tensors["x"].tolist() == [[1.0, 1.0]] * 3
    assert trace.run.case.token_ids == (1, 2, 3)


def test_a_request_is_put_together_from_chunks_steps_and_packed_rows(recorder):
    """Rows of two requests in one batch, in any order and with padding, become two traces in position order."""
    model = Model()
    recorder.watch(model)
    ids = torch.tensor(IDS)
    with torch.no_grad():
        whole = model(ids)
        recorder.tokens(["r"] * 4 + ["s"] * 3 + ["r"], [3, 2, 1, 0, 0, 1, 2, -1], ids=[13, 12, 11, 10, 10, 11, 12, 0])
        model(torch.tensor([13, 12, 11, 10, 10, 11, 12, 0]))
        recorder.tokens("r", range(4, 10), ids=IDS[4:10])
        model(ids[4:10])
        recorder.tokens("r", [10], ids=IDS[10:])
        model(ids[10:])
    trace, other = recorded(recorder), recorded(recorder, "s")
    assert trace.run.case.token_ids == tuple(IDS)
    assert trace.tensors["inputs.token_ids"].tolist() == IDS
    assert torch.allclose(trace.tensors["head"], whole, atol=1e-6)
    assert torch.allclose(other.tensors["head"], whole[:3], atol=1e-6)
    assert trace.taps["head"].dims == ("token", "feature")
    assert trace.tensors["blocks.0.out.1"].shape == (11, 8)
    assert "blocks.0.up" not in trace.tensors
    assert trace.provenance["engine"] == "toy 1.0"
    assert trace.provenance["version.torch"] == torch.__version__


def test_positions_that_never_came_are_named(recorder):
    """A request whose prefix was taken from a cache says which positions were seen."""
    recorder.names = ("*",)
    recorder.tokens("r", range(8, 11), ids=IDS[8:])
    recorder.tap("x", torch.ones(3, 2))
    trace = recorded(recorder)
    assert trace.facts["gaps"] == {"x": "positions 8-10"}
    assert trace.run.case.token_ids is None


def test_what_is_observed_is_not_changed(recorder):
    """A tap returns the very tensor; a view keeps its stride and offset, a later write does not reach the copy."""
    recorder.names = ("*",)
    base = torch.arange(40.0).reshape(4, 10)
    view = base[:, 2:8:2]
    recorder.tokens("r", range(4), ids=range(4))
    assert recorder.tap("x", view) is view
    before = view.clone()
    base.zero_()
    trace = recorded(recorder)
    assert torch.equal(trace.tensors["x"], before)
    line = json.loads((recorder.folder / "r" / "rank-0" / "statistics.jsonl").read_text())
    assert (line["stride"], line["offset"], line["shape"]) == ([10, 2], 2, [4, 3])


def test_statistics_are_kept_of_everything(recorder):
    """Every watched module has a line for each forward, with what is not finite counted, and no tensor unless named."""
    model = Model()
    recorder.watch(model)
    recorder.tokens("r", range(11), ids=IDS)
    with torch.no_grad():
        model(torch.tensor(IDS))
    recorder.tap("bad", torch.tensor([[1.0, float("nan"), float("inf")]] * 11))
    recorder.save()
    lines = [json.loads(s) for s in (recorder.folder / "r" / "rank-0" / "statistics.jsonl").read_text().splitlines()]
    by_name = {line["tap"]: line for line in lines}
    assert {"embed", "blocks.0", "blocks.0.up", "blocks.0.out.1", "head", "bad"} <= set(by_name)
    assert by_name["bad"]["nonfinite"] == 22
    assert by_name["head"]["n"] == 11 * 32
    assert len(by_name["head"]["sketch"]) == dropin.SAMPLES
    assert by_name["head"]["rms"] > 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_inside_a_compiled_region(recorder, backend):
    """Watched modules of a model that is captured whole record what the eager model records, and break no graph."""
    model = Model()
    recorder.watch(model)
    ids = torch.tensor(IDS)
    with torch.no_grad():
        recorder.tokens("eager", range(11), ids=IDS)
        want = model(ids)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        recorder.tokens("compiled", range(11), ids=IDS)
        got = compiled(ids)
    assert torch.equal(got, want)
    a, b = recorded(recorder, "eager"), recorded(recorder, "compiled")
    assert list(a.tensors) == list(b.tensors)
    assert all(torch.equal(a.tensors[n], b.tensors[n]) for n in a.tensors)


def test_compiled_layers_one_by_one(recorder):
    """Blocks compiled in place, as engines do, record what the eager model records under the same names."""
    model, other = Model(), Model()
    with torch.no_grad():
        for request, made in (("eager", model), ("compiled", other)):
            recorder.watch(made)
            if request == "compiled":
                torch._dynamo.reset()
                for block in made.blocks:
                    block.compile(backend="aot_eager", fullgraph=True)
            recorder.tokens(request, range(11), ids=IDS)
            made(torch.tensor(IDS))
    a, b = recorded(recorder, "eager"), recorded(recorder, "compiled")
    assert list(a.tensors) == list(b.tensors)
    assert all(torch.equal(a.tensors[n], b.tensors[n]) for n in a.tensors)


def test_recorders_do_not_mix(tmp_path):
    """A recorder that was closed leaves its successors alone, in captured regions too."""
    first = dropin.Recorder(tmp_path / "a", names=["*"])
    second = dropin.Recorder(tmp_path / "b", names=["*"])
    first.close()
    third = dropin.Recorder(tmp_path / "c", names=["*"])
    assert second._key != third._key
    second.close()
    third.close()


def test_memory_is_bounded(tmp_path):
    """Beyond max_bytes a tap is left out whole, and the manifest says so; the others stay."""
    recorder = dropin.Recorder(tmp_path, names=["*"], max_bytes=11 * 4 * 40)
    recorder.tokens("r", range(11), ids=IDS)
    recorder.tap("small", torch.ones(11, 4))
    recorder.tap("big", torch.ones(11, 400))
    recorder.close()
    trace = load_trace(tmp_path / "r" / "rank-0")
    assert set(trace.tensors) == {"inputs.token_ids", "small"}
    assert "max_bytes" in trace.facts["notes"]["big"]


def test_what_could_not_be_recorded_says_why(recorder):
    """A tap before tokens(), rows that do not fit, a module that never ran: each is in the notes."""
    recorder.names = ("*",)
    recorder._watched["never"] = False
    recorder.tap("early", torch.ones(3, 2))
    recorder.tokens("r", range(3), ids=[1, 2, 3])
    recorder.tap("uneven", torch.ones(4, 2), dims="token feature")
    recorder.tap("last", torch.ones(1, 5), rows=[2])
    trace = recorded(recorder)
    notes = trace.facts["notes"]
    assert "came before tokens()" in notes["early"]
    assert notes["uneven"] == "not kept: 4 rows where 3 were announced"
    assert "never called" in notes["never"]
    assert trace.facts["gaps"] == {"last": "positions 2-2"}


def test_wrong_words_are_refused(recorder):
    """As many requests and ids as positions."""
    with pytest.raises(ValueError, match="as many requests and ids as positions"):
        recorder.tokens("r", range(3), ids=[1])


def test_ranks_are_merged_as_declared(tmp_path):
    """Two tensor-parallel ranks of two pipeline stages become one trace."""
    full = torch.randn(11, 8)
    for rank in range(4):
        words = {"layout": {"tp": 2, "pp": 2}, "shards": {"*.q": -1, "*.partial": "sum"}}
        recorder = dropin.Recorder(tmp_path, names=["*"], rank=rank, **words)
        recorder.tokens("r", range(11), ids=IDS)
        stage, part = divmod(rank, 2)
        recorder.tap(f"layers.{stage}.q", full[:, 4 * part : 4 * part + 4])
        recorder.tap(f"layers.{stage}.partial", full / 2)
        recorder.tap(f"layers.{stage}", full + stage)
        recorder.close()
    (trace,) = load_recordings(tmp_path)
    assert torch.equal(trace.tensors["layers.1.q"], full)
    assert torch.allclose(trace.tensors["layers.0.partial"], full)
    assert torch.equal(trace.tensors["layers.1"], full + 1)
    assert trace.facts["ranks"] == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8])
def test_the_writer_writes_what_safetensors_reads(tmp_path, dtype):
    """Bytes, shapes and names survive, empty tensors too."""
    value = (torch.arange(24).reshape(2, 3, 4) % 2).to(dtype)
    dropin._write(tmp_path, 1, {"a": value, "none": value[:0]})
    from safetensors.torch import load_file

    loaded = load_file(tmp_path / "part-0001.safetensors")
    assert torch.equal(loaded["a"], value)
    assert loaded["none"].shape == (0, 3, 4)
