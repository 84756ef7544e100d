"""What the oracle's own choices reached: what was not exercised was not checked. Knows decisions, not limits."""

from __future__ import annotations

from harness.compare.align import as_choices
from harness.compare.subject import measured
from harness.metrics.discrete import as_sets, valid_candidates
from harness.taps import DECISION_KINDS
from harness.types import Measurement, Run, Trace


def coverage(stage: str, run: Run, oracle: Trace) -> list[Measurement]:
    """Measure for each decision of a run how much of it was exercised.

    Of a route, the share of experts that at least one token was sent to; of a selection, the share of tokens that had
    more candidates than they could choose, so that the choice meant something.
    """
    found = []
    for order, (name, tap) in enumerate(oracle.taps.items()):
        scores_name = name + ".scores"
        if tap.kind not in DECISION_KINDS or name not in oracle.tensors or scores_name not in oracle.tensors:
            continue
        ids, _ = as_choices(oracle.tensors[name], tap)
        scores, _ = as_choices(oracle.tensors[scores_name], oracle.taps[scores_name])
        if scores.shape[0] != ids.shape[0]:
            continue
        sets, valid = as_sets(ids, candidates=scores.shape[1]), valid_candidates(scores)
        if tap.kind == "routing":
            n = int(scores.shape[1])
            value = float(sets.member.any(dim=0).double().mean())
        else:
            n = int(scores.shape[0])
            value = float((valid.sum(dim=1) > (sets.member & valid).sum(dim=1)).double().mean())
        found.append(
            measured(stage, run, "decision_coverage_share", value, subject=name, order=order, n=n, kind=tap.kind)
        )
    return found
