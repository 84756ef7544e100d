"""Traces at rest."""

import json

import pytest
import torch

from harness.errors import TraceError
from harness.golden import load_failure, load_trace, save_failure, save_trace, store
from harness.types import Case, Failure, Image, Layout, Run, Setup, Tap, Trace


@pytest.fixture
def trace():
    image = Image(height=1, width=1, rgb="AAAA")
    case = Case(id="a", token_ids=(1, 2), images=(image,), image_at=(1,))
    return Trace(
        setup=Setup(side="reference", role="oracle", adapter="x", layout=Layout(tp=2)),
        run=Run(id="text/free", stage="text", kind="steps", case=case, steps=((0, 3), (3, 4))),
        taps={"b": Tap(name="b", dims=("token",)), "a": Tap(name="a", kind="routing")},
        tensors={"b": torch.tensor([1.0, float("nan")], dtype=torch.bfloat16), "a": torch.tensor([3])},
        facts={"modules": {"a": "model.a"}},
    )


def test_a_trace_comes_back_as_it_was(tmp_path, trace):
    """Setup, run, taps in execution order, tensors bit for bit (NaN too) and facts survive the disk."""
    save_trace(tmp_path / "t", trace)
    loaded = load_trace(tmp_path / "t")
    assert (loaded.setup, loaded.run, dict(loaded.taps)) == (trace.setup, trace.run, dict(trace.taps))
    assert list(loaded.tensors) == ["b", "a"]
    assert torch.equal(loaded.tensors["b"].view(torch.int16), trace.tensors["b"].view(torch.int16))
    assert loaded.facts == trace.facts


def test_equal_tensors_are_stored_once(tmp_path, trace):
    """A tensor that equals an earlier one costs no second copy, and is still found under both names."""
    same = torch.arange(4096.0)
    many = Trace(setup=trace.setup, run=trace.run, taps={}, tensors={f"t{i}": same.clone() for i in range(8)}, facts={})
    save_trace(tmp_path / "t", many)
    size = sum(f.stat().st_size for f in (tmp_path / "t").glob("*.safetensors"))
    assert size < 2 * same.numel() * 4
    assert torch.equal(load_trace(tmp_path / "t").tensors["t7"], same)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("flip a byte", "expected digest"),
        ("truncate", "expected .* bytes"),
        ("remove", "found nothing"),
        ("manifest", "expected a trace manifest"),
        ("format", "expected format 'day0.trace/2'"),
        ("facts", "was changed after it was written"),
        ("path", "was changed after it was written"),
        ("key", "expected parts in"),
    ],
)
def test_a_damaged_golden_is_refused_with_the_place(tmp_path, trace, harm, said):
    """A changed byte, a short file, a missing part, an edited manifest: each raises TraceError with the reason."""
    folder = tmp_path / "t"
    save_trace(folder, trace)
    part, manifest = folder / "part-0001.safetensors", folder / "manifest.json"
    data, words = part.read_bytes(), json.loads(manifest.read_text())
    if harm == "flip a byte":
        part.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif harm == "truncate":
        part.write_bytes(data[:-4])
    elif harm == "remove":
        part.unlink()
    elif harm == "manifest":
        manifest.write_text("{")
    elif harm == "format":
        manifest.write_text(json.dumps({**words, "format": "day0.trace/0"}))
    elif harm == "facts":
        manifest.write_text(json.dumps({**words, "facts": {"token_ids": [1]}}))
    elif harm == "key":
        manifest.write_text(json.dumps({k: v for k, v in words.items() if k != "parts"}))
    else:
        manifest.write_text(manifest.read_text().replace("part-0001", "../part-0001"))
    with pytest.raises(TraceError, match=said) as raised:
        dict(load_trace(folder).tensors)
    assert str(folder) in str(raised.value)


def test_a_path_out_of_the_folder_is_refused(tmp_path, trace):
    """Even a manifest whose seal is right may not name a file elsewhere."""
    folder = tmp_path / "t"
    save_trace(folder, trace)
    manifest = folder / "manifest.json"
    words = json.loads(manifest.read_text().replace("part-0001", "../part-0001"))
    manifest.write_text(json.dumps({**words, "seal": store._seal(words)}))
    with pytest.raises(TraceError, match="plain file names"):
        load_trace(folder)


def test_parts_are_bounded(tmp_path, trace, monkeypatch):
    """Tensors beyond the size of a part go into the next one, and are found there."""
    monkeypatch.setattr(store, "PART_BYTES", 10_000)
    tensors = {f"t{i}": torch.full((1000,), float(i)) for i in range(5)}
    many = Trace(setup=trace.setup, run=trace.run, taps={}, tensors=tensors, facts={})
    save_trace(tmp_path / "t", many)
    parts = sorted((tmp_path / "t").glob("*.safetensors"))
    assert len(parts) == 3
    assert all(p.stat().st_size < 10_000 for p in parts)
    assert torch.equal(load_trace(tmp_path / "t").tensors["t4"], tensors["t4"])


def test_a_failure_replaces_a_trace(tmp_path, trace):
    """A run that did not end leaves its failure, and nothing of an older trace."""
    save_trace(tmp_path / "t", trace)
    failure = Failure(run="text/free", kind="hang", message="m", last_tap="layers.3")
    save_failure(tmp_path / "t", failure)
    assert load_failure(tmp_path / "t") == failure
    with pytest.raises(TraceError):
        load_trace(tmp_path / "t")
