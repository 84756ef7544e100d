"""Is the port up, and does it speak? Knows runs, traces and facts; must not know limits.

Ready means one real generation, not an open port. The text front end is held against the reference's, fact by fact; two
requests at once, and the endpoint where there is one, against the port's own single answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.adapters.smoke import CHECKS
from harness.cases import seeded_ids, special_strings, text_case
from harness.stages import StageContext, StageView, loss, measured
from harness.stages.operators import OPERATOR_METRICS, SPAN, coverage_facts, operators_of
from harness.stages.shadowed import SHADOW_METRICS, picture_case, shadow_runs, shadowed
from harness.types import Failure, Measurement, Run, Trace

NAME = "startup"
NEEDS: tuple[str, ...] = ()

OPERATORS, READY, CHAT = "startup/operators", "startup/ready", "startup/chat"
CONCURRENT, SERVE = "startup/concurrent", "startup/serve"
_PROMPT_TOKENS, _OTHER_TOKENS = 13, 6
_SPECIALS = 8

TEXTS = (
    "The capital of France is",
    "",
    " ",
    "  leading, trailing and  double spaces  ",
    "tabs\tand\n\nnewlines\r\n",
    "Zürich, naïve, Ελλάδα, Привет, 東京, 안녕하세요, नमस्ते",
    "🙂👩‍👩‍👧🇨🇭 and e\u0301 beside é",
    "0123456789 3.14159 1e-05 0x7f",
    "def f(x):\n    return {'a': [x ** 2, -x]}  # comment",
)
PROMPTS = (
    "The capital of France is",
    "Zürich 東京 안녕 🙂",
    "Once upon a time, in a small town by the sea, there lived",
)
PICTURE = (2, 5)
"""Height and width of the picture that the endpoint is shown, in merged patches; a little more, so it is resized."""
CONVERSATIONS: tuple[tuple[Mapping[str, str], ...], ...] = (
    ({"role": "user", "content": "What is the capital of France?"},),
    (
        {"role": "user", "content": "  Say 안녕 🙂\n"},
        {"role": "assistant", "content": "안녕 🙂"},
        {"role": "user", "content": "Again, please."},
    ),
)


def plan(context: StageContext) -> list[Run]:
    """Return the runs of this stage: operators alone, one generation, then what the port claims beside it."""
    info = context.info
    steps = 16 if context.full else 6
    case = text_case(info, _PROMPT_TOKENS, max_new_tokens=steps)
    runs = [Run(id=READY, stage=NAME, kind="generate", case=case, observe=False)]
    if "operators" not in context.scope.off:
        uses = picture_case(context) or case  # what is used is found by running it: the tower, too
        alone = Run(
            id=OPERATORS, stage=NAME, kind="operators", case=uses, observe=False, options={"full": context.full}
        )
        runs = [alone, *shadow_runs(context), *runs]
    if "chat" in context.capabilities:
        specials = special_strings(info)[:_SPECIALS]
        texts = (*TEXTS, *(f"before{s}after" for s in specials), "".join(specials)) if specials else TEXTS
        options = {
            "texts": list(texts),
            "ids": [[i] for i in info.special_ids],
            "conversations": [list(c) for c in CONVERSATIONS],
        }
        runs.append(Run(id=CHAT, stage=NAME, kind="chat", options=options))
    if "phases" in context.capabilities:
        other = {"other": list(seeded_ids(info, _OTHER_TOKENS, seed=1))}
        runs.append(Run(id=CONCURRENT, stage=NAME, kind="concurrent", case=case, options=other))
    if context.scope.serves and "serves" in context.capabilities:
        first = 0 if context.full else 1  # the last ones carry the multi-byte text and the earlier turns
        asked: dict[str, Any] = {
            "prompts": list(PROMPTS[first:]),
            "conversations": [list(c) for c in CONVERSATIONS[first:]],
        }
        if context.scope.image and info.patch_size and "chat" in context.capabilities:
            asked["picture"] = [side * info.patch_size * info.merge_size + 3 for side in PICTURE]
        runs.append(Run(id=SERVE, stage=NAME, kind="serve", case=case, options=asked))
    return runs


def measure(view: StageView) -> list[Measurement]:
    """Measure every run of this stage, in the order they ran; one that failed is measured as an error."""
    return [
        replace(m, order=m.order + SPAN * number)
        for number, run in enumerate(view.runs)
        for m in _measured(view, run)
    ]  # fmt: skip


def _measured(view: StageView, run: Run) -> Sequence[Measurement]:
    """Measure one run."""
    accel = view.trace("accel", run.id)
    if not isinstance(accel, Trace):
        return _lost(run, accel, "the port")
    if run.kind == "chat":
        oracle = view.trace("oracle", run.id)
        if not isinstance(oracle, Trace):
            return _lost(run, oracle, "the reference")
        return _chat(run, actual=accel.facts, expected=oracle.facts)
    return list(_MEASURES[run.kind](run, accel.facts)) if run.kind in _MEASURES else []


def facts(view: StageView) -> dict[str, Any]:
    """Return the coverage table of the operators, for the report."""
    traces = [view.trace("accel", run.id) for run in view.runs if run.kind == "operators"]
    known = [coverage_facts(t.facts) for t in traces if isinstance(t, Trace)]
    return {"operators": known[0]} if known else {}


_PROMISED = {
    "operators": OPERATOR_METRICS,
    "shadow": SHADOW_METRICS,
    "generate": ("ready_tokens",),
    "chat": ("tokenizer_mismatches", "template_mismatches", "eos_mismatches"),
    "concurrent": ("concurrency_mismatches",),
    "serve": ("endpoint_errors",),
}


def _lost(run: Run, side: Failure | Trace | None, who: str) -> list[Measurement]:
    assert not isinstance(side, Trace)
    message = f"{who}: {side.kind}: {side.message}" if side is not None else f"{who} has no trace of this run"
    detail = {"message": message, **loss(side)}
    return [measured(NAME, run, metric, None, "*", problem="error", detail=detail) for metric in _PROMISED[run.kind]]


def _ready(run: Run, facts: Mapping[str, Any]) -> list[Measurement]:
    """Count the tokens of one real generation; its times are shown."""
    found = [
        measured(
            NAME, run, "ready_tokens", len(facts["token_ids"]), "generate", detail={"token_ids": facts["token_ids"]}
        )
    ]
    found += [
        measured(NAME, run, name, facts[name], "generate") for name in ("ttft_s", "tokens_per_s") if name in facts
    ]
    return found


def _chat(run: Run, *, actual: Mapping[str, Any], expected: Mapping[str, Any]) -> list[Measurement]:
    """Hold the port's text front end against the reference's, text by text, conversation by conversation."""
    found: list[Measurement] = []
    texts = run.options["texts"]
    pairs: list[tuple[str, str, Any, Any]] = []
    for number, text in enumerate(texts):
        pairs.append(("encode", text, actual["encoded"].get(text), expected["encoded"].get(text)))
        pairs.append(("decode", text, _at(actual["round_trip"], number), _at(expected["round_trip"], number)))
        pairs.append(("decode_partial", text, actual["partial"].get(text), expected["partial"].get(text)))
    for number, ids in enumerate(run.options["ids"]):
        pairs.append(("decode", str(ids), _at(actual["decoded"], number), _at(expected["decoded"], number)))
    found += [
        _mismatch(run, "tokenizer_mismatches", f"tokenizer.{part}", actual=a, expected=e, where={"text": text})
        for part, text, a, e in pairs
    ]
    for number in range(len(run.options["conversations"])):
        for part in ("rendered", "prepared"):
            pair = {"actual": _at(actual[part], number), "expected": _at(expected[part], number)}
            place = {"conversation": number}
            found.append(_mismatch(run, "template_mismatches", f"template.{part}", where=place, **pair))
    wrong = sorted(set(actual["eos_ids"]) ^ set(expected["eos_ids"]))
    detail: dict[str, Any] = {"actual": list(actual["eos_ids"]), "expected": list(expected["eos_ids"])}
    if not expected["eos_ids"]:
        detail["message"] = "the reference names no end-of-sequence id"
    found.append(measured(NAME, run, "eos_mismatches", len(wrong), "eos_ids", detail=detail))
    return found


def _mismatch(
    run: Run, metric: str, subject: str, *, actual: Any, expected: Any, where: Mapping[str, Any]
) -> Measurement:
    """Return 0 or 1, with the place of the first difference; what the reference did not answer is missing."""
    if expected is None:
        detail = {"message": "the reference gave no answer"}
        return measured(NAME, run, metric, None, subject, problem="missing", where=where, detail=detail)
    same = actual == expected
    detail = {} if same else {"actual": _around(actual, expected), "expected": _around(expected, actual)}
    return measured(NAME, run, metric, 0 if same else 1, subject, where=where, detail=detail)


def _around(value: Any, other: Any) -> str:
    """Return the part of a value around its first difference from another, with the index."""
    if not isinstance(value, (str, list)) or not isinstance(other, (str, list)):
        return repr(value)[:200]
    at = next((i for i, (a, b) in enumerate(zip(value, other)) if a != b), min(len(value), len(other)))  # noqa: B905
    return f"{value[max(0, at - 8) : at + 24]!r} (differs from index {at} on, length {len(value)})"


def _concurrent(run: Run, facts: Mapping[str, Any]) -> Iterator[Measurement]:
    """Count the tokens in which a request differs beside another one from the same request alone."""
    wrong = sum(
        abs(len(a) - len(b)) + sum(x != y for x, y in zip(a, b))  # noqa: B905  (the lengths' difference is counted)
        for a, b in zip(facts["alone"], facts["together"], strict=True)
    )
    count = sum(len(ids) for ids in facts["alone"])
    if count == 0:
        yield measured(NAME, run, "concurrency_mismatches", None, "slots", problem="empty", detail=dict(facts))
        return
    subject = "slots" if facts.get("repeatable", True) else "slots.repeat"
    yield measured(NAME, run, "concurrency_mismatches", wrong, subject, n=count, detail=dict(facts))


def _serve(run: Run, facts: Mapping[str, Any]) -> Iterator[Measurement]:
    """Return the errors of every check of the endpoint; one that was not reached is missing."""
    checks: Mapping[str, Any] = facts["checks"]
    for name in CHECKS:
        if name in checks:
            entry = checks[name]
            detail = {"message": "; ".join(entry["detail"])}
            yield measured(
                NAME, run, "endpoint_errors", entry["errors"], f"endpoint.{name}", n=entry["of"], detail=detail
            )
        elif name not in facts["not_applicable"]:
            detail = {"message": "this check was not reached"}
            yield measured(NAME, run, "endpoint_errors", None, f"endpoint.{name}", problem="missing", detail=detail)


def _at(values: Sequence[Any], index: int) -> Any:
    return values[index] if index < len(values) else None


_MEASURES: Mapping[str, Callable[[Run, Mapping[str, Any]], Iterable[Measurement]]] = {
    "generate": _ready, "operators": operators_of, "shadow": shadowed, "concurrent": _concurrent, "serve": _serve,
}  # fmt: skip
