"""What the oracle's own choices reached: what was not exercised was not checked. Knows decisions, not limits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from harness.compare.align import as_choices
from harness.compare.subject import measured
from harness.metrics.discrete import as_sets, valid_candidates
from harness.taps import DECISION_KINDS
from harness.types import Measurement, Run, Trace


def idle_experts(stage: str, run: Run, oracles: Sequence[Trace], *, experts: int, need: int) -> list[Measurement]:
    """Count for each route the experts that fewer than `need` tokens of all the runs together were sent to.

    Where there are any, the measurement is one of too few samples, which names them.
    """
    counts: dict[str, Tensor] = {}
    for trace in oracles:
        for name, tap in trace.taps.items():
            scores = trace.tensors.get(f"{name}.scores")
            if tap.kind != "routing" or scores is None or scores.shape[-1] != experts:
                continue
            ids, _ = as_choices(trace.tensors[name], tap)
            counts[name] = counts.get(name, 0) + as_sets(ids, candidates=experts).member.sum(dim=0)
    found = []
    for name, count in counts.items():
        idle = (count < need).nonzero()[:, 0].tolist()
        more = f" and {len(idle) - 8} more" if len(idle) > 8 else ""
        message = f"fewer than {need} tokens were sent to experts {', '.join(map(str, idle[:8]))}{more} of {experts}"
        found.append(
            measured(
                stage, run, "idle_experts", None if idle else 0, subject=name, n=experts, kind="routing",
                order=list(oracles[0].taps).index(name) if name in oracles[0].taps else 0,
                problem="too_few" if idle else "", detail={"message": message, "experts": idle} if idle else {},
            )
        )  # fmt: skip
    return found


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
