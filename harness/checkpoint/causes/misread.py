"""The known mistakes of readers of quantised weights, as changes of what is stored. No tensor in memory, no names.

Each takes a weight written out by place (`stored`) and returns what a reader that makes the mistake has in its stead,
or None where the format leaves no room for it. Words go on after "what the stored codes give with".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.checkpoint.causes.stored import Fields, Stored, float8_table
from harness.checkpoint.integers import AWQ_ORDER

Change = Callable[[Stored], Stored]
_FLOATS8 = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float8_e4m3fnuz: "the FNUZ dialect of e4m3 (a factor of 2)",
    torch.float8_e5m2fnuz: "the FNUZ dialect of e5m2 (a factor of 2)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One way to read wrongly: `part` says of what (codes, values, zeros, narrow; scales are in `misscaled`)."""

    part: str
    words: str
    change: Change


def misread_codes(stored: Stored) -> Iterator[Mistake]:
    """Yield the mistakes with codes, with what they are worth, and with zero points."""
    if stored.each > 1:
        yield from _unpacked_otherwise(stored)
    if stored.kind == "e2m1":
        yield from _e2m1(stored)
    elif stored.kind == "float8":
        yield from _float8(stored)
    else:
        yield from _integers(stored)
        yield from _zero_points(stored)
    for dtype, name in ((torch.float16, "float16"), (torch.bfloat16, "bfloat16")):
        yield _narrow(dtype, f"factors and products rounded to {name} ({name} dequantisation)")


def _narrow(dtype: torch.dtype, words: str) -> Mistake:
    return Mistake(part="narrow", words=words, change=lambda s: dataclasses.replace(s, narrow=dtype))


def _fields(words: str, wrap: Callable[..., Fields], *given: Any) -> Mistake:
    return Mistake(part="codes", words=words, change=lambda s: dataclasses.replace(s, fields=wrap(s, *given)))


def _given(table: Tensor, _: Tensor) -> Tensor:
    return table


def _values(words: str, make: Callable[[Tensor], Tensor]) -> Mistake:
    return Mistake(part="values", words=words, change=lambda s: dataclasses.replace(s, values=make(s.values)))


# --- the order of codes within bytes, words, rows ---


def _unpacked_otherwise(stored: Stored) -> Iterator[Mistake]:
    each = stored.each
    orders = {"the nibbles of each byte swapped (high before low)": [i ^ 1 for i in range(each)]}
    if stored.bits != 4:
        orders = {}
    if each > 2:
        size = 8 // stored.bits
        orders |= {
            "the codes of each word taken from the other end": list(range(each))[::-1],
            "the bytes of each word swapped (another byte order)": [
                each - size - i // size * size + i % size for i in range(each)
            ],
        }
    if each == 8:
        awq, inverse = list(AWQ_ORDER), [AWQ_ORDER.index(j) for j in range(8)]
        if stored.version == "awq":
            # Columns are in output order already: to read words in their own order is to undo that.
            orders["the nibbles of each word in their own order 0 1 2 3 (not AWQ's 0 2 4 6 1 3 5 7)"] = awq
            orders["the nibbles of each word put in AWQ's order the wrong way round"] = [awq[awq[j]] for j in range(8)]
        else:
            orders["the nibbles of each word in AWQ's order 0 2 4 6 1 3 5 7"] = inverse
            orders["the nibbles of each word in AWQ's order, the other way round"] = awq
    for words, order in orders.items():
        if order != list(range(each)):
            yield _fields(words, _reordered, order)
    if each == 2:
        for width, what in ((stored.shape[1], "row"), (stored.block[1], "block")):
            if width >= 4 and stored.shape[1] % width == 0:
                words = f"all low nibbles of a {what} before its high ones, not by turns"
                yield _fields(words, _halved, width)


def _reordered(stored: Stored, order: list[int]) -> Fields:
    """Return the codes in another order within each byte or word, along the axis that is packed."""
    each = stored.each
    place = torch.tensor(order)
    if stored.along == "rows":
        count = stored.shape[0]

        def by_rows(rows: Tensor) -> Tensor:
            return stored.fields((rows // each * each + place[rows % each]).clamp(max=count - 1))

        return by_rows
    columns = torch.arange(stored.shape[1])
    taken = (columns // each * each + place[columns % each]).clamp(max=stored.shape[1] - 1)
    return lambda rows: stored.fields(rows).index_select(1, taken)


def _halved(stored: Stored, width: int) -> Fields:
    def fields(rows: Tensor) -> Tensor:
        pairs = stored.fields(rows).reshape(len(rows), -1, width // 2, 2)
        return pairs.transpose(-1, -2).reshape(len(rows), -1)

    return fields


# --- what codes are worth ---


def _e2m1(stored: Stored) -> Iterator[Mistake]:
    yield _values("the sign bit ignored", torch.abs)
    codes = torch.arange(16).float()
    for words, table in (
        ("the codes read as whole numbers 0 .. 15", codes),
        ("the codes read as signed 4-bit integers", torch.where(codes < 8, codes, codes - 16)),
        ("the codes read as integers stored plus 8", codes - 8),
    ):
        yield _values(words, partial(_given, table))
    normal = torch.tensor([0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    with_zero = torch.cat((torch.zeros(1), normal[1:]))
    for table in (normal, with_zero):
        signed = torch.cat((table, -table))
        yield _values("the smallest codes read as normal numbers (no subnormals)", partial(_given, signed))
    nothing, e2m1 = torch.zeros(8), stored.values
    for words, extended in (
        ("the high nibble of each byte shifted as a signed number, its negative codes lost (zero)", nothing),
        ("the high nibble of each byte shifted as a signed number, its sign lost", e2m1[:8]),
        ("the high nibble of each byte shifted as a signed number, its sign taken three times", 3 * e2m1[:8]),
        ("the high nibble of each byte shifted as a signed number and used as it is", torch.arange(8).float() - 8),
    ):
        yield from _extended(words, extended, 1, 2)


def _extended(words: str, worth: Tensor, at: int, each: int) -> Iterator[Mistake]:
    """Yield what sign extension does: codes with the top bit set are worth something else at one place of each unit."""

    def change(s: Stored) -> Stored:
        half = 1 << (s.bits - 1)
        columns = torch.arange(s.shape[1]) % each == at

        def fields(rows: Tensor) -> Tensor:
            codes = s.fields(rows)
            return torch.where(columns & (codes >= half), codes + half, codes)

        return dataclasses.replace(s, fields=fields, values=torch.cat((s.values, worth)))

    yield Mistake(part="codes", words=words, change=change)


def _float8(stored: Stored) -> Iterator[Mistake]:
    for dtype, name in _FLOATS8.items():
        if dtype != stored.dtype:
            table = float8_table(dtype)
            yield _values(f"the codes read as {name}", partial(_given, table))
    yield _values("the sign bit ignored", torch.abs)
    codes = torch.arange(256).float()
    yield _values("the codes read as signed integers", partial(_given, torch.where(codes < 128, codes, codes - 256)))
    yield _values("the codes read as whole numbers 0 .. 255", partial(_given, codes))


def _integers(stored: Stored) -> Iterator[Mistake]:
    half, bits = float(1 << (stored.bits - 1)), stored.bits
    codes = torch.arange(1 << bits).float()
    signed = torch.where(codes < half, codes, codes - 2 * half)
    last = stored.each - 1
    if stored.zeros is None or stored.version == "int4_packed":
        for words, table in (
            (f"the offset of {half:.0f} not subtracted", codes),
            (f"codes read as two's complement (they are stored plus {half:.0f})", signed),
            (f"an offset of {half - 1:.0f} for {half:.0f}", codes - half + 1),
            (f"an offset of {half + 1:.0f} for {half:.0f}", codes - half - 1),
        ):
            yield _values(words, partial(_given, table))
        extended = stored.values[int(half) :] - 2 * half
    else:
        yield _values("codes read as two's complement", partial(_given, signed))
        extended = codes[int(half) :] - 2 * half
    if stored.along == "columns":
        yield from _extended("the last code of each word shifted as a signed number", extended, last, stored.each)


def _zero_points(stored: Stored) -> Iterator[Mistake]:
    if stored.zeros is None:
        return
    top, half = 1 << stored.bits, float(1 << (stored.bits - 1))

    def zeros(words: str, make: Callable[[Tensor], Tensor]) -> Mistake:
        def change(s: Stored) -> Stored:
            assert s.zeros is not None
            return dataclasses.replace(s, zeros=dataclasses.replace(s.zeros, values=make(s.zeros.values)))

        return Mistake(part="zeros", words=words, change=change)

    if stored.version == "gptq_v1":
        yield zeros("every zero point off by one (GPTQ version 1 stores them less one)", lambda z: (z - 1) % top)
        yield zeros("every zero point off by one (GPTQ version 1 stores them less one)", lambda z: z - 1)
        yield zeros("zero points of 16 where they wrap to 0", lambda z: torch.where(z == 0, torch.full_like(z, top), z))
    else:
        yield zeros("every zero point off by one (1 added, as GPTQ version 1 needs)", lambda z: z + 1)
        yield zeros("every zero point off by one (1 added, as GPTQ version 1 needs)", lambda z: (z + 1) % top)
        yield zeros("every zero point off by one (1 subtracted)", lambda z: z - 1)
    middle = 0.0 if stored.version == "int4_packed" else half
    yield zeros("its zero points ignored (taken as the middle)", lambda z: torch.full_like(z, middle))
    yield zeros("no zero points at all", torch.zeros_like)
    yield zeros("each zero point's sign turned", torch.neg)
    yield zeros("the zero points of the next group", lambda z: z.roll(-1, 1))
    yield zeros("the zero points of the group before", lambda z: z.roll(1, 1))
    if stored.version == "awq":
        for words, order in (
            ("the zero points' nibbles in their own order (not AWQ's)", list(AWQ_ORDER)),
            ("the zero points' nibbles put in AWQ's order twice", [AWQ_ORDER[j] for j in AWQ_ORDER]),
        ):
            yield zeros(words, partial(_in_words, order))


def _in_words(order: list[int], zeros: Tensor) -> Tensor:
    """Put the zero points of each word in another order. zeros [O, groups]."""
    return zeros.reshape(-1, 8, zeros.shape[1])[:, order].reshape(zeros.shape)
