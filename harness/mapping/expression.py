"""The small language of mapping files. Knows tensors and syntax trees; never evaluates text as Python.

    out             the first tensor of the row's `from`      out[1]                its second one
    tap("NAME")     another recorded tensor                   x[..., 0:64]  x[3]    slices and indices of constants
    x + y  x - y  -x  x * 0.5  x / 2                          numbers only as factors
    cat(x, y, axis=-1)     stack(x, y, axis=0)     take(x, [2, 0, 1], axis=-1)     blocks(x, [1, 0], axis=-1)
    reshape(x, 5, -1)      permute(x, 1, 0, 2)     transpose(x, 0, 1)              squeeze(x, 0)   unsqueeze(x, 0)
    flatten(x, 1, -1)      unflatten(x, -1, 4, -1) one axis into several
    halves(x, heads=4)     interleave(x, heads=4)  the two layouts of rotated pairs, along the last axis

`blocks` cuts an axis into as many equal pieces as there are numbers and puts them in that order (heads, experts);
`halves` brings interleaved pairs into halves, `interleave` halves into pairs.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.errors import MappingError

LENGTH = 500
"""Characters of the longest expression."""
Lookup = Callable[[str], Tensor]


def parse(text: str) -> ast.expr:
    """Return the tree of an expression. Raises MappingError naming what is not in the language."""
    if not isinstance(text, str) or not text.strip():
        raise MappingError(f"expected an expression, found {text!r}")
    if len(text) > LENGTH:
        raise MappingError(f"expected an expression of at most {LENGTH} characters, found {len(text)}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MappingError(f"expected an expression of the mapping language, found {text!r}: {error}") from error
    _check(tree, text)
    return tree


def names_in(tree: ast.expr) -> list[str]:
    """Return the tensors that an expression asks for by `tap("NAME")`."""
    return [str(_literal(n.args[0])) for n in ast.walk(tree) if isinstance(n, ast.Call) and _called(n) == "tap"]


def uses_out(tree: ast.expr) -> bool:
    """Say whether an expression speaks of the tensors of the row's own `from`."""
    return any(isinstance(n, ast.Name) and n.id == "out" for n in ast.walk(tree))


def evaluate(tree: ast.expr, *, out: Callable[[int], Tensor], tap: Lookup) -> Tensor:
    """Compute an expression. Raises MappingError where shapes do not fit."""
    try:
        return _value(tree, out, tap)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise MappingError(f"{ast.unparse(tree)}: the shapes do not fit: {_first_line(error)}") from error


def _value(node: ast.expr, out: Callable[[int], Tensor], tap: Lookup) -> Tensor:
    if isinstance(node, ast.Name):
        return out(0)
    if isinstance(node, ast.UnaryOp):
        return -_value(node.operand, out, tap)
    if isinstance(node, ast.BinOp):
        return _arithmetic(node, out, tap)
    if isinstance(node, ast.Subscript):
        number = _literal(node.slice)
        if isinstance(node.value, ast.Name) and isinstance(number, int):
            return out(number)
        return _value(node.value, out, tap)[_index(node.slice)]
    assert isinstance(node, ast.Call)
    if _called(node) == "tap":
        return tap(str(_literal(node.args[0])))
    tensors = [_value(a, out, tap) for a in node.args if not _is_constant(a)]
    numbers = [_literal(a) for a in node.args if _is_constant(a)]
    words = {str(k.arg): _literal(k.value) for k in node.keywords}
    return _FUNCTIONS[_called(node)](tensors, numbers, words)


def _arithmetic(node: ast.BinOp, out: Callable[[int], Tensor], tap: Lookup) -> Tensor:
    left, right = node.left, node.right
    if isinstance(node.op, ast.Mult):
        tensor, factor = (left, right) if _is_constant(right) else (right, left)
        return _value(tensor, out, tap).mul(_literal(factor))
    if isinstance(node.op, ast.Div):
        return _value(left, out, tap).div(_literal(right))
    a, b = _value(left, out, tap), _value(right, out, tap)
    if a.shape != b.shape:
        raise ValueError(f"{tuple(a.shape)} and {tuple(b.shape)}")
    return a + b if isinstance(node.op, ast.Add) else a - b


def _axis(words: dict[str, Any], default: int = -1) -> int:
    return int(words.get("axis", default))


def _cat(tensors: Sequence[Tensor], numbers: Sequence[Any], words: dict[str, Any]) -> Tensor:
    return torch.cat(list(tensors), dim=_axis(words))


def _stack(tensors: Sequence[Tensor], numbers: Sequence[Any], words: dict[str, Any]) -> Tensor:
    return torch.stack(list(tensors), dim=_axis(words, 0))


def _take(tensors: Sequence[Tensor], numbers: Sequence[Any], words: dict[str, Any]) -> Tensor:
    return tensors[0].index_select(_axis(words), torch.tensor(numbers[0], device=tensors[0].device))


def _blocks(tensors: Sequence[Tensor], numbers: Sequence[Any], words: dict[str, Any]) -> Tensor:
    (tensor,), order, axis = tensors, numbers[0], _axis(words)
    if tensor.shape[axis] % len(order) or sorted(order) != list(range(len(order))):
        raise ValueError(f"{len(order)} blocks in the order {order} of an axis of {tensor.shape[axis]}")
    pieces = tensor.chunk(len(order), dim=axis)
    return torch.cat([pieces[i] for i in order], dim=axis)


def _paired(tensors: Sequence[Tensor], words: dict[str, Any], *, halves: bool) -> Tensor:
    (tensor,), heads = tensors, int(words.get("heads", 1))
    if heads < 1 or tensor.shape[-1] % (2 * heads):
        raise ValueError(f"{heads} heads of pairs in an axis of {tensor.shape[-1]}")
    half = tensor.shape[-1] // heads // 2
    split = (heads, half, 2) if halves else (heads, 2, half)
    return tensor.reshape(*tensor.shape[:-1], *split).transpose(-1, -2).reshape(tensor.shape)


_FUNCTIONS: dict[str, Callable[[Sequence[Tensor], Sequence[Any], dict[str, Any]], Tensor]] = {
    "cat": _cat,
    "stack": _stack,
    "take": _take,
    "blocks": _blocks,
    "reshape": lambda t, n, w: t[0].reshape([int(i) for i in n]),
    "permute": lambda t, n, w: t[0].permute([int(i) for i in n]),
    "transpose": lambda t, n, w: t[0].transpose(int(n[0]), int(n[1])),
    "squeeze": lambda t, n, w: t[0].squeeze(int(n[0])),
    "unsqueeze": lambda t, n, w: t[0].unsqueeze(int(n[0])),
    "flatten": lambda t, n, w: t[0].flatten(int(n[0]), int(n[1])),
    "unflatten": lambda t, n, w: torch.unflatten(t[0], int(n[0]), [int(i) for i in n[1:]]),
    "halves": lambda t, n, w: _paired(t, w, halves=True),
    "interleave": lambda t, n, w: _paired(t, w, halves=False),
}
_TENSORS = {"cat": (1, 64), "stack": (1, 64)}
"""Least and most tensors that a function takes, where it is not one."""
_NUMBERS = {
    "take": (1, 1), "blocks": (1, 1), "reshape": (1, 8), "permute": (1, 8), "transpose": (2, 2), "squeeze": (1, 1),
    "unsqueeze": (1, 1), "flatten": (2, 2), "unflatten": (3, 8),
}  # fmt: skip
_WORDS = {"cat": {"axis"}, "stack": {"axis"}, "take": {"axis"}, "blocks": {"axis"}, "halves": {"heads"},
          "interleave": {"heads"}}  # fmt: skip


def _check(node: ast.AST, text: str) -> None:
    """Raise MappingError unless a node, as a tensor, is in the language."""
    if isinstance(node, ast.Name) and node.id == "out":
        return
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not _is_constant(node):
        return _check(node.operand, text)
    if isinstance(node, ast.BinOp):
        return _check_arithmetic(node, text)
    if isinstance(node, ast.Subscript):
        _check(node.value, text)
        return _check_index(node.slice, text)
    if isinstance(node, ast.Call):
        return _check_call(node, text)
    raise _refused(node, text)


def _check_arithmetic(node: ast.BinOp, text: str) -> None:
    numbers = [n for n in (node.left, node.right) if _is_constant(n)]
    if any(not isinstance(_literal(n), (int, float)) for n in numbers):
        raise _refused(node, text)
    if isinstance(node.op, ast.Mult) and len(numbers) == 1:
        return _check(node.right if numbers[0] is node.left else node.left, text)
    if isinstance(node.op, ast.Div) and numbers == [node.right] and _literal(node.right) != 0:
        return _check(node.left, text)
    if isinstance(node.op, (ast.Add, ast.Sub)) and not numbers:
        _check(node.left, text)
        return _check(node.right, text)
    raise _refused(node, text)


def _check_index(node: ast.expr, text: str) -> None:
    for item in node.elts if isinstance(node, ast.Tuple) else [node]:
        bounds = [item.lower, item.upper, item.step] if isinstance(item, ast.Slice) else [item]
        for bound in bounds:
            fine = bound is None or (_is_constant(bound) and isinstance(_literal(bound), (int, type(Ellipsis))))
            if not fine or (isinstance(item, ast.Slice) and bound is not None and _literal(bound) is Ellipsis):
                raise _refused(node, text)


def _check_call(node: ast.Call, text: str) -> None:
    name = _called(node)
    words = {k.arg for k in node.keywords}
    if name == "tap":
        named = len(node.args) == 1 and not words and isinstance(node.args[0], ast.Constant)
        if not named or not isinstance(_literal(node.args[0]), str):
            raise _refused(node, text)
        return
    if name not in _FUNCTIONS or not words <= _WORDS.get(name, set()):
        raise _refused(node, text)
    tensors, numbers = ([a for a in node.args if _is_constant(a) is kind] for kind in (False, True))
    (least, most), (fewest, highest) = _TENSORS.get(name, (1, 1)), _NUMBERS.get(name, (0, 0))
    ordered = node.args == [*tensors, *numbers]
    if not (ordered and least <= len(tensors) <= most and fewest <= len(numbers) <= highest):
        raise _refused(node, text)
    lists = name in ("take", "blocks")
    if any(isinstance(_literal(n), list) is not lists or isinstance(_literal(n), (str, float)) for n in numbers):
        raise _refused(node, text)
    if any(not _is_constant(k.value) or not isinstance(_literal(k.value), int) for k in node.keywords):
        raise _refused(node, text)
    for tensor in tensors:
        _check(tensor, text)


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _is_constant(node: ast.AST) -> bool:
    return _literal(node) is not None


def _literal(node: ast.AST) -> Any:
    """Return a number, a string, an ellipsis or a list of whole numbers; None for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, str, type(Ellipsis)):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand)
        return -value if type(value) in (int, float) else None
    if isinstance(node, ast.List) and node.elts:
        values = [_literal(e) for e in node.elts]
        return values if all(type(v) is int for v in values) else None
    return None


def _index(node: ast.expr) -> Any:
    items = node.elts if isinstance(node, ast.Tuple) else [node]
    return tuple(
        slice(*(None if b is None else _literal(b) for b in (i.lower, i.upper, i.step)))
        if isinstance(i, ast.Slice)
        else _literal(i)
        for i in items
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _refused(node: ast.AST, text: str) -> MappingError:
    return MappingError(
        f"{ast.unparse(node)!r} in {text!r} is not in the mapping language: slices, sums, numbers as factors, "
        f"tap(...), {', '.join(sorted(_FUNCTIONS))}; see harness/mapping/expression.py"
    )
