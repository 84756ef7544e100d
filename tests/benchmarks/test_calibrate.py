"""The calibration's own arithmetic, and what it writes."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import calibrate

from harness.types import Criterion, Measurement

CRITERION = Criterion(
    id="text.layers", stage="text", metric="error_ratio", op="<=", limit=1.0, unit="ratio", why="w", source="s",
    per_sqrt_n=4.0,
)  # fmt: skip


def measurement(value: float, n: int = 4) -> Measurement:
    return Measurement(metric="error_ratio", value=value, unit="ratio", subject="layers.0", stage="text", n=n)


def test_the_bound_of_a_rate_is_the_exact_binomial_one():
    """Without a broken run the 95 % bound is 1 - 0.05^(1/n); one broken run raises it."""
    assert calibrate.rate_bound(0, 195) == pytest.approx(1 - 0.05 ** (1 / 195), rel=1e-6)
    assert calibrate.rate_bound(1, 195) > calibrate.rate_bound(0, 195)
    assert calibrate.rate_bound(10, 10) == 1.0


def test_how_much_of_a_limit_was_used_follows_its_size_at_n():
    """At four samples the limit is 3: a value of 1.5 uses half of it, and NaN all of it and more."""
    assert calibrate.usage(CRITERION, measurement(1.5)) == pytest.approx(0.5)
    assert calibrate.usage(CRITERION, measurement(math.nan)) == math.inf


def test_a_checklist_gets_one_line_and_keeps_its_limits(tmp_path):
    """The line stands beside the source, is replaced the next time, and nothing else changes."""
    first = '[[criteria]]\nid = "text.layers"\nlimit = 1.0\nsource = "s"\n'
    text = f'# words\n{first}\n[[criteria]]\nid = "other"\nsource = "t"\n'
    file = tmp_path / "text.toml"
    file.write_text(text)
    for runs in (100, 195):
        calibrate.write(tmp_path, {"text.layers": calibrate.Tally(runs=runs, used=0.73)}, "20 seeds")
    lines = file.read_text().splitlines()
    told = [line for line in lines if line.startswith("calibrated")]
    assert len(told) == 1
    assert told[0].startswith('calibrated = "0 of 195 honest runs broke it (rate below 1.5% at 95 %)')
    assert [line for line in lines if line not in told] == text.splitlines()
