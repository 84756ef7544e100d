"""Mapping files: what they say, and what is wrong with them."""

from __future__ import annotations

import pytest
import torch

from harness.errors import MappingError
from harness.mapping import apply_mapping, parse_mapping, read_mapping
from harness.types import Case, Run, Setup, Tap, Trace

HEAD = 'format = "day0.map/1"\n'


def row(**words: str) -> str:
    return "[[taps]]\n" + "".join(f"{'from' if k == 'source' else k} = '{v}'\n" for k, v in words.items())


def trace(**tensors: torch.Tensor) -> Trace:
    named = {name.replace("__", "."): t for name, t in tensors.items()}
    return Trace(
        setup=Setup(side="accel", role="accel", adapter="x"),
        run=Run(id="r", stage="text", kind="forward", case=Case(id="c", token_ids=(1, 2, 3))),
        taps={name: Tap(name=name) for name in named},
        tensors=named,
        facts={},
    )


def test_a_pattern_maps_every_layer_and_keeps_the_order():
    """{n} stands for the layer's number; taps come in the order of their sources, other tensors keep their names."""
    ones, zeros = torch.ones(3, 2), torch.zeros(3, 2)
    recorded = trace(h__0=ones, h__0__out__1=ones, extra=torch.zeros(3, 1), h__1=ones, h__1__out__1=zeros)
    rows = parse_mapping(HEAD + row(tap="layers.{n}", source="h.{n}", expr="out[0] + out[1]"))
    mapped = apply_mapping(recorded, rows)
    assert list(mapped.tensors) == ["layers.0", "extra", "layers.1"]
    assert mapped.tensors["layers.0"].unique().tolist() == [2.0]
    assert mapped.taps["layers.0"].dims == ("token", "feature")


def test_one_tensor_gives_several_taps_and_several_give_one():
    """A fused projection is split by three rows; a tap is put together of two tensors by name."""
    recorded = trace(qkv=torch.arange(18.0).reshape(3, 6), a=torch.ones(3, 2), b=torch.zeros(3, 2))
    text = HEAD + row(tap="q", source="qkv", expr="out[..., 0:2]") + row(tap="v", source="qkv", expr="out[..., 4:6]")
    text += row(tap="ab", expr='cat(tap("a"), tap("b"))', dims="token feature", kind="hidden")
    mapped = apply_mapping(recorded, parse_mapping(text))
    assert torch.equal(mapped.tensors["v"], recorded.tensors["qkv"][:, 4:6])
    assert mapped.tensors["ab"].shape == (3, 4)
    assert set(mapped.tensors) == {"q", "v", "ab"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected format = 'day0.map/1', found None"),
        ("format = 1", "found 1"),
        ("format =", "expected TOML"),
        (HEAD, "a mapping of nothing maps nothing"),
        (HEAD + "taps = [1]", "expected a table"),
        (HEAD + "tap = 1", "did you mean 'taps'"),
        (HEAD + row(source="a"), "expected `tap`"),
        (HEAD + row(tap="a", source="b", exper="out"), "did you mean 'expr'"),
        (HEAD + "[[taps]]\ntap = 1", "expected a string for 'tap'"),
        (HEAD + row(tap="a"), "there is no `from`"),
        (HEAD + row(tap="a", source="b") * 2, "expected each tap once"),
        (HEAD + row(tap="a", source="b", expr="out.T"), r"number 1 \(a\): 'out.T' .* is not in the mapping language"),
        (HEAD + row(tap="a.{n}", source="b"), "the same {...}"),
        (HEAD + row(tap="a", source="b.{n}"), "the same {...}"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused(text, said):
    """What is wrong is named, with the row and the nearest right word."""
    with pytest.raises(MappingError, match=said):
        parse_mapping(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (row(tap="a", source="nowhere"), "matches nothing: no recorded tensor is named 'nowhere'"),
        (row(tap="a.{n}", source="h.{n}.x"), "matches nothing"),
        (row(tap="a", source="h", expr="out[1]"), "needs the tensor 'h.out.1', which was not recorded"),
        (row(tap="a", source="h", expr="out[:, 0:2] + out"), r"the shapes do not fit.*h \(3, 4\)"),
        (row(tap="a", source="h", dims="token"), r"dims 'token' for a tensor of shape \(3, 4\)"),
        (row(tap="a", source="h", kind="hiden"), "did you mean 'hidden'"),
    ],
)  # fmt: skip
def test_a_mapping_that_does_not_fit_is_refused(text, said):
    """A row that matches nothing, misses a tensor, or does not fit the shapes is an error, never a tap left out."""
    with pytest.raises(MappingError, match=said):
        apply_mapping(trace(h=torch.ones(3, 4)), parse_mapping(HEAD + text))


def test_a_missing_file_is_named(tmp_path):
    """The path is in the message."""
    with pytest.raises(MappingError, match=r"nowhere\.toml"):
        read_mapping(tmp_path / "nowhere.toml")
