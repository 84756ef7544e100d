"""The shared records. Knows nothing of torch, files, stages or limits; every room may import it.

All records are frozen, slotted, keyword-only dataclasses. `as_json` and `from_json` move any of them across a process
or a file; tensors never travel in them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

STAGES = ("load", "startup", "text", "image", "multi_card", "long_context")
T = TypeVar("T")

Facts = Mapping[str, Any]
"""What one call observed besides tensors: plain JSON, units as key suffixes (`_s`, `_bytes`, `_tokens`)."""


class Status(str, Enum):
    """The answer to one promise, or to one stage."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    ERROR = "ERROR"
    INCONCLUSIVE = "INCONCLUSIVE"
    SKIPPED = "SKIPPED"
    BLOCKED = "BLOCKED"
    WAIVED = "WAIVED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One picture as raw RGB, row-major, 8 bits a channel, base64 in `rgb`."""

    height: int
    width: int
    rgb: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One input, identical for both sides. Data, never a generator.

    Exactly one of `prompt` (tokenised by each side), `messages` (rendered by the chat template of each side) and
    `token_ids` is given. Token ids of a case with images hold no placeholders: each side inserts them itself at
    `image_at` (index into `token_ids`, one per image).
    """

    id: str
    kind: str = "text"
    prompt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    token_ids: tuple[int, ...] | None = None
    images: tuple[Image, ...] = ()
    image_at: tuple[int, ...] = ()
    max_new_tokens: int = 16
    seed: int = 0
    source: str = "seeded"

    @property
    def digest(self) -> str:
        """Hex digest of the whole input."""
        return digest_of(as_json(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a model is split: degrees of tensor, expert, pipeline and sequence parallelism."""

    tp: int = 1
    ep: int = 1
    pp: int = 1
    sp: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks; expert parallelism reuses the tensor-parallel ranks, as most engines do."""
        return max(self.tp, self.ep) * self.pp * self.sp

    def __str__(self) -> str:
        return "x".join(f"{k}{v}" for k, v in dataclasses.asdict(self).items() if v > 1) or "single"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Who runs, and how. `role` is oracle, floor or accel; `options` are the query keys of the SPEC, as strings.

    `precision` is what the port declares of its numbers beside its dtype (`harness.precision.scheme`): a floor computes
    so, a port is told what its user declared for it.
    """

    side: str
    role: str
    adapter: str
    dtype: str = "bfloat16"
    precision: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    layout: Layout = Layout()
    options: Mapping[str, str] = field(default_factory=dict)
    threads: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Tap:
    """A place to look. `dims` names the axes (`batch token feature head expert rank ...`)."""

    name: str
    kind: str = "hidden"
    dims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What a port claims, and what it switched off with the reason. Printed beside every verdict.

    `precision` is what it declares of weights, activations, cache and state beside its dtype (`harness.precision`).
    `precisions` are further ones that the port can run in, beside the declared one, to be judged more sharply there.
    `unobservable` maps a glob of tap names to the reason; `replay` says whether the port goes on with what the recorder
    returns; `off` maps a feature (`image`, `multi_card`, `phases`, `weights`, `chat`, ...) to the reason it is absent.
    """

    text: bool = True
    image: bool = False
    layouts: tuple[Layout, ...] = (Layout(),)
    phases: tuple[str, ...] = ("prefill",)
    max_length_tokens: int = 2048
    replay: bool = True
    serves: bool = False
    chat: bool = False
    fallbacks: tuple[str, ...] = ()
    precision: Mapping[str, str] = field(default_factory=dict)
    precisions: tuple[str, ...] = ()
    unobservable: Mapping[str, str] = field(default_factory=dict)
    off: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One thing that a worker does for one case, and how it looks while doing it. Data for `harness.worker`.

    `kind`: load, content, weights, operators, forward, steps, generate, latency, chat, concurrent, serve, simulate,
    collectives, ranks, search (of the reference alone: token ids for the runs whose case says `search:` and its id as
    source).
    `steps`: token spans `(start, stop)` of consecutive calls over one cache (kind `steps`).
    `level`: 0 records freely; 1 (layer), 2 (child), 3 (leaf) additionally overwrites every tap of at most that level.
    `pin`: id of the run of `pin_role` whose values are replayed; `pin_decisions` overwrites routes and selections too.
    `jitter`: seed of a jitter by an ulp (probability 1/8 each way) on the pinned values; 0 is none.
    `before`: token ids of a request that used the same slot earlier. `taps`: globs of taps to keep; empty keeps all.
    `dtype`: the port's precision in this run, where it is not the declared one.
    """

    id: str
    stage: str
    kind: str
    case: Case | None = None
    steps: tuple[tuple[int, int], ...] = ()
    level: int = 0
    pin: str | None = None
    pin_role: str = "oracle"
    pin_decisions: bool = False
    jitter: int = 0
    before: tuple[int, ...] = ()
    taps: tuple[str, ...] = ()
    observe: bool = True
    repeat: int = 1
    layout: Layout = Layout()
    dtype: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one run observed: tensors by tap in execution order, and facts. A golden is a Trace at rest."""

    setup: Setup
    run: Run
    taps: Mapping[str, Tap]
    tensors: Mapping[str, torch.Tensor]
    facts: Facts
    provenance: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A run that did not end: what happened, where, and what is known. `kind`: crash, hang, raised, memory, refused."""

    run: str
    kind: str
    message: str
    last_tap: str = ""
    stack: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A number with its place. `value` None means promised but not measured, and `problem` says why.

    `problem`: missing, no_signal, too_few, statistics (no tensors), error, empty. `n` is the effective number of
    samples of the slice that gave `value`. `run` is the id of the run; `where` gives the slice (`{"token": 17}`,
    `{"head": 3}`) and further keys that criteria can select on. `order` is the place in execution order, for "the first
    wrong place wins".
    """

    metric: str
    value: float | None
    unit: str
    subject: str
    stage: str
    case: str = ""
    run: str = ""
    n: int = 1
    order: int = 0
    problem: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """A promise a non-programmer can read. The limit at n samples is `limit + per_sqrt_n / sqrt(n)`.

    `subject` and the values of `select` are globs; `select` matches `case`, `run` or any key of `where`. `needs` names
    what must be in scope (`image`, `weights`, `phases`, `serves`, `multi_card`, `chat`, `replay`, `decisions`).
    `calibrated` says how often honest runs broke it.
    """

    id: str
    stage: str
    metric: str
    op: str
    limit: float
    unit: str
    why: str
    source: str
    subject: str = "*"
    select: Mapping[str, str] = field(default_factory=dict)
    per_sqrt_n: float = 0.0
    blocking: bool = True
    core: bool = False
    needs: tuple[str, ...] = ()
    practice: str = ""
    calibrated: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiver:
    """An accepted exception: who owns it, where it is tracked, when it ends (ISO date)."""

    criterion: str
    subject: str
    owner: str
    link: str
    expires: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer to one promise. `limit` is the one at the worst measurement's n; `margin` is limit minus value."""

    criterion: Criterion
    status: Status
    worst: Measurement | None = None
    limit: float | None = None
    margin: float | None = None
    count: int = 0
    failed: int = 0
    reason: str = ""
    reproduce: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One diagnosed place: where, in the port's own words too, the likely cause, and how to see it again."""

    tap: str
    module: str
    op: str
    cause: str
    message: str
    evidence: tuple[str, ...] = ()
    residual_ratio: float | None = None
    reproduce: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """One gated stage: its verdicts, findings, and what was measured but judged by nobody."""

    name: str
    status: Status
    reason: str = ""
    verdicts: tuple[Verdict, ...] = ()
    findings: tuple[Finding, ...] = ()
    unjudged: tuple[str, ...] = ()
    facts: Facts = field(default_factory=dict)
    wall_s: float = 0.0
    peak_bytes: int = 0

    @property
    def accepted(self) -> bool:
        """A stage is accepted when it PASSED (waived criteria included); a skipped one is neither."""
        return self.status is Status.PASSED


_PLAIN = frozenset({str, int, float, bool, type(None)})


def as_json(value: Any) -> Any:
    """Turn records, enums, paths, tuples and mappings into plain JSON values."""
    if type(value) in _PLAIN:  # nearly everything in a long list of facts
        return value
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): as_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    return value


def from_json(cls: type[T], data: Any) -> T:
    """Build a record of type `cls` from what `as_json` gave. Raises TypeError on unknown or missing keys."""
    return typing.cast(T, _build(cls, data))


def _build(kind: Any, data: Any) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = _hints(kind)
        return kind(**{k: _build(hints.get(k, Any), v) for k, v in data.items()})
    if origin in (typing.Union, types.UnionType):
        if data is None:
            return None
        return _build(next(a for a in args if a is not type(None)), data)
    if origin is tuple:
        inner = args[0] if len(args) == 2 and args[1] is Ellipsis else None
        return tuple(
            _build(inner if inner is not None else a, v)
            for v, a in zip(data, args if inner is None else [None] * len(data), strict=True)
        )
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(data)
    return data


@functools.lru_cache(maxsize=256)
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, {**vars(typing), **_names(), **vars(sys.modules[kind.__module__])})


def _names() -> dict[str, Any]:
    return {**globals(), "torch": types.SimpleNamespace(Tensor=Any)}


def digest_of(value: Any) -> str:
    """Hex digest (blake2b, 16 bytes) of a JSON value, key order ignored."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
