"""What the cases reached: what was not exercised was not checked. Knows the oracle's traces; must not know limits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.compare.align import as_choices, as_rows
from harness.compare.subject import measured
from harness.metrics.discrete import as_sets, valid_candidates
from harness.taps import DECISION_KINDS, layer_of
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
    idle = {name: (count < need).nonzero()[:, 0].tolist() for name, count in counts.items()}
    named = "; ".join(f"{layer_of(name)}: {_listed(ids)} of {experts}" for name, ids in idle.items() if ids)
    message = f"fewer than {need} tokens were sent to experts {named}"
    order = list(oracles[0].taps) if oracles else []
    return [
        measured(
            stage, run, "idle_experts", None if ids else 0, subject=name, n=experts, kind="routing",
            order=order.index(name) if name in order else 0,
            problem="too_few" if ids else "", detail={"message": message, "experts": ids} if ids else {},
        )
        for name, ids in idle.items()
    ]  # fmt: skip


def _listed(items: Sequence[Any]) -> str:
    more = f" and {len(items) - 8} more" if len(items) > 8 else ""
    return ", ".join(map(str, items[:8])) + more


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
        made = _made(oracle, name)
        if made is None:
            continue
        chosen, valid = made
        if tap.kind == "routing":
            n, value = valid.shape[1], float(chosen.any(dim=0).double().mean())
        else:
            n, value = valid.shape[0], float(_dropped(chosen, valid).double().mean())
        found.append(
            measured(stage, run, "decision_coverage_share", value, subject=name, order=order, n=n, kind=tap.kind)
        )
    return found


SILENT = 1e-6
"""Share of the mean head's size below which a head gives nothing."""
CAPS = {
    "swiglu_limit": r"\.(gate_proj|up_proj|gate_up_proj)$",
    "final_logit_softcapping": r"^logits$",
    "logit_softcap": r"^logits$",
}
"""Limits of the configuration, and the taps whose values they cut."""
REACHED = 0.5
"""Share of a limit from which on a value shows that it is there: a soft cap of x reads 0.46 x at half of it."""


def unexercised(
    stage: str, run: Run, oracles: Sequence[Trace], *, config: Mapping[str, Any], edges: Mapping[str, int], heads: int
) -> list[Measurement]:
    """Say for heads, selections, limits and lengths of a model whether the cases of all runs reached them.

    Each is a measurement of its own (`what`): 0 where all are reached, else one of too few samples that names the rest.
    """
    longest = max((len(trace.run.case.token_ids or ()) for trace in oracles if trace.run.case), default=0)
    parts = {
        "heads": dict(_heads(oracles, heads)),
        "selections": dict(_selections(oracles)),
        "limits": dict(_limits(oracles, config)),
        "lengths": {f"{name} {edge}": longest > edge for name, edge in edges.items()},
    }
    return [exercise(stage, run, what, reached) for what, reached in parts.items()]


def exercise(stage: str, run: Run, what: str, reached: Mapping[str, bool]) -> Measurement:
    """Return the measurement of one kind of thing: which of them were reached."""
    idle = [name for name, yes in reached.items() if not yes]
    done = f"{what}: {len(reached) - len(idle)} of {len(reached)} exercised" if reached else f"{what}: none here"
    message = f"{done}; not {_listed(idle)}" if idle else done
    return measured(
        stage, run, "unexercised", None if idle else 0, subject="cases", n=len(reached), where={"what": what},
        problem="too_few" if idle else "", detail={"message": message, "idle": idle},
    )  # fmt: skip


def _heads(oracles: Sequence[Trace], heads: int) -> Iterator[tuple[str, bool]]:
    """Yield each head of each attention and whether it gave anything on any token of any run."""
    sizes: dict[str, Tensor] = {}
    for trace in oracles:
        for name, tap in trace.taps.items():
            if not name.endswith(".attn.core") or name not in trace.tensors:
                continue
            rows = as_rows(trace.tensors[name], tap)
            count = rows.heads or (heads if heads and rows.values.shape[1] % heads == 0 else 1)
            size = rows.values.float().reshape(len(rows.values), count, -1).norm(dim=-1).amax(dim=0)
            sizes[name] = torch.maximum(sizes[name], size) if name in sizes else size
    for name, size in sizes.items():
        yield from ((f"{name} head {i}", bool(v > SILENT * size.mean())) for i, v in enumerate(size))


def _selections(oracles: Sequence[Trace]) -> Iterator[tuple[str, bool]]:
    """Yield each selection and whether any token of any run had more candidates than it could choose."""
    found: dict[str, bool] = {}
    for trace in oracles:
        for name, tap in trace.taps.items():
            scores = trace.tensors.get(name + ".scores")
            if tap.kind != "selection" or name not in trace.tensors or scores is None:
                continue
            made = _made(trace, name)
            found[name] = found.get(name, False) or (made is not None and bool(_dropped(*made).any()))
    yield from found.items()


def _made(trace: Trace, name: str) -> tuple[Tensor, Tensor] | None:
    """Return what a decision chose and what it could choose, [T, candidates]; None where its scores are of others."""
    ids, _ = as_choices(trace.tensors[name], trace.taps[name])
    scores, _ = as_choices(trace.tensors[name + ".scores"], trace.taps[name + ".scores"])
    if scores.shape[0] != ids.shape[0]:
        return None
    return as_sets(ids, candidates=scores.shape[1]).member, valid_candidates(scores)


def _dropped(chosen: Tensor, valid: Tensor) -> Tensor:
    """Say for each token whether its choice left valid candidates out."""
    return valid.sum(dim=1) > (chosen & valid).sum(dim=1)


def _limits(oracles: Sequence[Trace], config: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield each clamp or soft cap of the configuration and whether a value came near it.

    A limit that no tap shows counts as not reached.
    """
    text = config.get("text_config") or config
    for key, pattern in CAPS.items():
        cap = text.get(key)
        if not isinstance(cap, (int, float)) or cap <= 0:
            continue
        seen = [
            float(trace.tensors[name].abs().max()) for trace in oracles for name in trace.tensors
            if re.search(pattern, name) and trace.tensors[name].numel()
        ]  # fmt: skip
        near = REACHED if "cap" in key else 1.0
        yield f"{key} {cap:g}{'' if seen else ' (no tap shows it)'}", bool(seen) and max(seen) >= near * cap
