"""What the startup page and the terminal say of operators: what is wrong and what costs most first, in few lines."""

from __future__ import annotations

import pytest

from harness.report.markdown import _render
from harness.report.operators import operator_tables, sentence


def row(operator, level="library", on_host=0, **more):
    known = {"family": "", "prefill": 4, "decode": 2, "inside": [], "view": False, "made_of": 0}
    return {**known, "operator": operator, "level": level, "on_host": on_host, **more}


def alone(operator, *, right=True, dtype="bfloat16", own=False, level="library"):
    return {
        "operator": operator, "dtype": dtype, "level": level, "cases": 3, "ratio": 0.5 if right else 7.0,
        "needed": True, "own": own, "right": right, "pattern": "" if right else "wrong only for widths 33..64",
    }  # fmt: skip


@pytest.fixture
def facts():
    rows = [
        row("aten::add.Tensor", "host", 2), row("aten::t", view=True), row("vendor::mix", "custom", 9, made_of=5,
        inside=["aten::mul", "aten::sum"]), row("aten::mm"),
    ]  # fmt: skip
    return {
        "device": "pocket:1", "failed": "", "decode_counted": True, "rows": rows, "arithmetic": {},
        "fallbacks": {"aten::add.Tensor": 2, "vendor::mix": 9}, "replaced": [], "contracts": [],
        "own": {"norm.rms": "custom", "rms_norm": "custom", "linear.fast": "custom", "act.gelu": "library"},
        "alone": [
            alone("softmax", right=False), alone("add"), alone("add", dtype="float32"),
            alone("rms_norm", own=True, level="custom"),
        ],
        "runtime": {"not_applicable": "", "checks": {"peak": "", "pinned": "copies [0] hold what came later"}},
    }  # fmt: skip


def test_the_sentence_says_what_falls_back_and_who_serves(facts):
    """On a device: levels, then calls of one decode step, the most first; of a plain CPU the levels alone."""
    levels = "operators of the port: custom, except act.gelu (library)"
    assert sentence(facts) == f"{levels}; 11 calls of one decode step fall back to the CPU (vendor::mix 9, add 2)"
    assert sentence({**facts, "device": "cpu"}) == levels
    assert "broke off: OutOfMemoryError" in sentence({**facts, "failed": "OutOfMemoryError: pocket:1"})
    silent = {**facts, "own": {}, "fallbacks": {}, "decode_counted": False}
    assert sentence(silent) == "nothing of one prefill falls back from pocket:1 to the CPU"


def test_the_tables_begin_with_what_is_wrong_and_what_costs_most(facts):
    """Wrong ones have a table of their own, rows go by fallbacks, dtypes are columns, views are one line."""
    told = operator_tables(facts)
    assert [r[0] for r in told.wrong] == ["softmax"]
    assert [r[0] for r in told.used] == ["vendor::mix", "aten::add.Tensor", "aten::mm"]
    assert told.used[0][2] == "custom (of 5 of torch's)"
    assert told.used[0][5] == "9 (mul, sum)"
    assert told.views == "t 4 / 2"
    assert told.alone[1] == ("add", "library", "6", "0.5", "0.5")
    assert told.own[0] == ("custom", "norm.rms, linear.fast", "rms_norm")
    assert operator_tables({**facts, "alone": [alone("add")]}).wrong == []


def test_the_page_has_every_table_in_one_piece(facts):
    """Each table follows its heading without a gap between rows; a broken promise of the runtime is told by name."""
    page = _render("_operators.md.j2", table=facts, told=operator_tables(facts))
    assert "| operator | level | cases | bfloat16 | float32 |\n|---|---|---:|---:|---:|\n| softmax" in page
    assert "- runtime, pinned: copies [0] hold what came later\n- runtime, as promised: peak" in page
    assert "| softmax | bfloat16 | library | 7 | wrong only for widths 33..64 |  |" in page
