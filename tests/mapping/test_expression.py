"""The language of mapping files: what it computes, and that nothing else is in it."""

from __future__ import annotations

import pytest
import torch

from harness.errors import MappingError
from harness.mapping.expression import LENGTH, evaluate, names_in, parse

X = torch.arange(24.0).reshape(4, 6)
OUTPUTS = (X, X + 100)


def value(text: str) -> torch.Tensor:
    return evaluate(parse(text), out=lambda i: OUTPUTS[i], tap=lambda name: {"other": X * 2}[name])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("out", X),
        ("out[1]", X + 100),
        ("out[0] + out[1]", X + X + 100),
        ("out[1] - out", torch.full((4, 6), 100.0)),
        ("-out * 0.5", -X / 2),
        ("2 * (out / 4)", X / 2),
        ("out[..., 0:2]", X[..., 0:2]),
        ("out[:, -1]", X[:, -1]),
        ("out[1:3, ::2]", X[1:3, ::2]),
        ('tap("other")[0]', X[0] * 2),
        ('cat(out, tap("other"), axis=-1)', torch.cat([X, X * 2], -1)),
        ("stack(out, out[1])", torch.stack([X, X + 100])),
        ("take(out, [2, 0], axis=0)", X[[2, 0]]),
        ("blocks(out, [2, 0, 1])", X[:, [4, 5, 0, 1, 2, 3]]),
        ("reshape(out, 4, 2, -1)", X.reshape(4, 2, 3)),
        ("permute(out, 1, 0)", X.T),
        ("transpose(out, 0, 1)", X.T),
        ("squeeze(unsqueeze(out, 0), 0)", X),
        ("flatten(unflatten(out, -1, 2, 3), 1, -1)", X),
        ("halves(out, heads=1)", X[:, [0, 2, 4, 1, 3, 5]]),
        ("interleave(halves(out, heads=3), heads=3)", X),
    ],
)
def test_what_the_language_computes(text, expected):
    """Slices, sums, factors, joins, permutations and the two layouts of rotated pairs mean what they say."""
    assert torch.equal(value(text), expected)


REFUSED = [
    "", " ", "out +", "x", "True", "1", '"text"', "None", "out; out", "out = 1", "[out]", "(out, out)", "{out}",
    "lambda: out", "out if out else out", "out and out", "not out", "~out", "out == out", "out @ out", "out ** 2",
    "out // 2", "out % 2", "out << 1", "out * out", "out / out", "2 / out", "out / 0", "out + 1", "1 - out", "2 * 3",
    "out.T", "out.data", "out.__class__", "out[out]", "out['a']", "out[1.5]", "out[None]", "out[a:b]", "out[...:1]",
    "out[[0, 1]]", "out[True]", "open('f')", "__import__('os')", "eval('1')", "exec('1')", "getattr(out, 'T')",
    "out()", "out.sum()", "torch.cat(out)", "(lambda x: x)(out)", "cat()", "cat(out, 1)", "cat(out, dim=1)",
    "cat(out, axis=1.0)", "cat(out, axis=out)", "cat(*out)", "cat(**out)", "take(out, 1)", "take(out, [1.5])",
    "take(out, [])", "take([0], out)", "take(out, [out])", "permute(out)", "permute(out, 'a')", "permute(out, 1.0)",
    "permute(out, [1, 0])", "blocks(out, 2)", "halves(out, 2)", "halves(out, heads='a')", "reshape(out, axis=1)",
    "transpose(out, 0)", "tap(out)", "tap()", "tap('a', 'b')", "tap(name='a')", "f'{out}'", "[x for x in out]",
    "(x := out)", "await out", "yield out", "out[0:1](out)", "import os", "out * 1j", "out * True", "tap(b'a')",
]  # fmt: skip


@pytest.mark.parametrize("text", [*REFUSED, "-" * 120 + "out" + "+out" * 100, "(" * 300 + "out" + ")" * 300, "out\0"])
def test_what_is_not_in_the_language_is_refused(text):
    """Every other construct of Python, known or not, is a MappingError; nothing of it is run."""
    with pytest.raises(MappingError):
        parse(text)


def test_a_long_expression_is_refused():
    """An expression has an end."""
    with pytest.raises(MappingError, match=f"at most {LENGTH} characters"):
        parse("out" + " + out" * 100)


@pytest.mark.parametrize(
    "text",
    [
        "out + out[..., 0:2]", "cat(out, permute(out, 1, 0), axis=0)", "reshape(out, 5, 5)", "permute(out, 0, 1, 2)",
        "take(out, [9])", "blocks(out, [0, 1, 2, 3])", "blocks(out, [0, 0])", "halves(out, heads=2)", "out[9, 0]",
        "unflatten(out, -1, 4, 4)", "halves(out, heads=0)", "squeeze(out, 5)", "out[:, :, 0]",
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit_are_named(text):
    """An expression that is in the language, but not for these shapes, says so."""
    with pytest.raises(MappingError, match="the shapes do not fit"):
        value(text)


def test_the_tensors_of_an_expression_are_known_before_it_is_computed():
    """`tap` names are read from the tree."""
    assert names_in(parse('cat(tap("a"), out, tap("b")[0])')) == ["a", "b"]
