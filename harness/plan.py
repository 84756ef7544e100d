"""Everything that is decided before anything is loaded: sides, precision, scope, cases, runs. Must not know limits."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.cases import ModelInfo, read_model_info
from harness.checkpoint.cut import Cut, read_cut
from harness.config import Config
from harness.configfile import anchor_spec
from harness.errors import CheckpointError, NothingToVerify, SpecError, UsageError
from harness.golden import Carried, checkpoint_digest
from harness.plugins import Spec, default_checkpoint, parse_spec
from harness.precision.scheme import parse_precision
from harness.record import Session, Watchdog
from harness.schedule import ORACLE_OF
from harness.stages import StageContext, stage_module
from harness.taps import DECISION_KINDS, matches
from harness.types import STAGES, Case, Failure, Layout, Run, Scope, Setup, Trace, as_json, digest_of, from_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will run. `skipped` gives the reason for each stage outside the scope; `described` what each side said.

    `carried` is the recorded reference that stands in for one that does not run here, and `stand_in` says why it does.
    `cut` says which layers of the whole model the checkpoint holds, where it is part of one.
    """

    config: Config
    checkpoint: Path
    info: ModelInfo
    setups: Mapping[str, Setup]
    described: Mapping[str, Mapping[str, Any]]
    scope: Scope
    context: StageContext
    stages: Mapping[str, tuple[Run, ...]]
    skipped: Mapping[str, str]
    digests: Mapping[str, str]
    carried: Carried | None = None
    stand_in: str = ""
    cut: Cut | None = None

    def runs(self, *stages: str) -> list[Run]:
        """Return the runs of some stages, in order."""
        return [run for name in STAGES if name in stages for run in self.stages.get(name, ())]


def make_sessions(config: Config, folder: Path, carried: Sequence[Carried] = ()) -> tuple[Path, dict[str, Session]]:
    """Return the checkpoint and a session per side, not started. Raises SpecError and UsageError.

    `carried` are recorded references: where they are, the reference's own checkpoint need not be on this machine.
    """
    specs = {"reference": parse_spec(config.reference.spec), "accel": parse_spec(config.accel.spec)}
    live = reference_wanted(config, carried)
    named = {"accel": default_checkpoint(specs["accel"]), "reference": None}
    try:
        named["reference"] = default_checkpoint(specs["reference"]) if live else None
    except SpecError:
        if not carried:
            raise
    own = config.run.checkpoint or named["reference"] or named["accel"]
    checkpoint = own or (carried[0].checkpoint if carried else None)
    if checkpoint is None:
        raise UsageError(
            "expected a checkpoint, found none: neither SPEC names one; use hf:PATH or a builtin as --reference, or "
            "--set run.checkpoint=FOLDER"
        )
    _check_there(checkpoint, weights=own is not None)
    limits = config.watchdog
    watchdog = Watchdog(describe_s=limits.startup_s, load_s=limits.load_s, run_s=limits.run_s)
    pythons = {"reference": sys.executable, "accel": config.accel.python or sys.executable}
    sessions = {
        side: Session(
            folder / side,
            spec=_spec_text(config, side),
            checkpoint=(config.run.checkpoint if specs[side].kind == "builtin" else None) or named[side] or checkpoint,
            watchdog=watchdog,
            python=pythons[side],
        )
        for side in specs
    }
    return checkpoint, sessions


def reference_named(config: Config) -> bool:
    """Say whether the user named a reference, in the file or on the command line."""
    return "spec" in config.reference.model_fields_set


def reference_wanted(config: Config, carried: Sequence[Carried]) -> bool:
    """Say whether the reference itself is to be used: it was named, nothing stands in for it, or it recorded that."""
    return reference_named(config) or all(c.spec == config.reference.spec for c in carried)


def _check_there(checkpoint: Path, *, weights: bool) -> None:
    """Raise UsageError where there is no configuration or no weights at all, before any worker is started."""
    from harness.checkpoint import open_checkpoint

    try:
        read_model_info(checkpoint)
        if weights:
            open_checkpoint(checkpoint)
    except CheckpointError as error:
        raise UsageError(str(error)) from error


def make_setups(config: Config, carried: Carried | None = None) -> dict[str, Setup]:
    """Return who runs how, by role; a recorded reference as it was recorded."""
    port = config.accel.dtype
    oracle = config.reference.dtype or ORACLE_OF[port]
    rows = {"oracle": ("reference", oracle), "floor": ("reference", port), "accel": ("accel", port)}
    setups = {}
    for role, (side, dtype) in rows.items():
        text = _spec_text(config, side)
        section = config.accel if side == "accel" else config.reference
        options = {**parse_spec(text).options, **section.options}
        if side == "accel" and config.accel.fallback:
            options["fallback"] = config.accel.fallback
        setups[role] = Setup(
            side=side,
            role=role,
            adapter=text,
            dtype=dtype,
            precision={} if role == "oracle" else config.accel.precision,
            device=options.get("device", "cpu"),
            options={k: v for k, v in options.items() if k not in ("dtype", "device")},
        )
    return setups if carried is None else {**setups, **carried.setups}


def make_plan(
    config: Config,
    checkpoint: Path,
    described: Mapping[str, Mapping[str, Any]],
    *,
    carried: Carried | None = None,
    stand_in: str = "",
) -> Plan:
    """Decide scope, cases and runs. Raises NothingToVerify where no asked stage is in scope, CheckpointError."""
    info = read_model_info(checkpoint)
    claimed = from_json(Scope, described["accel"]["scope"])
    scope = declared(config.scope.apply(claimed), config.accel.precision)
    setups = _floor_as_declared(make_setups(config, carried), scope, described["reference"]["capabilities"], carried)
    capable = frozenset(described["accel"]["capabilities"])
    context = StageContext(
        info=info,
        scope=scope,
        capabilities=frozenset(c for c in capable if not out_of_scope(c, scope, capable)),
        reference_capabilities=frozenset(described["reference"]["capabilities"]),
        profile=config.run.profile,
        dtype=setups["accel"].dtype,
        options={"cases": tuple(from_json(Case, case) for case in described["accel"].get("cases", ()))},
    )
    last = max(STAGES.index(name) for name in config.run.stage)
    wanted = config.run.stage if config.run.after else STAGES[: last + 1]
    skipped, stages = {}, {}
    for name in wanted:
        module = stage_module(name)
        reasons = [r for need in module.NEEDS if (r := out_of_scope(need, scope, capable))]
        if name in claimed.off and not reasons:  # a port may lack a stage; the user cannot wish one away
            reasons = [claimed.off[name]]
        if reasons:
            skipped[name] = "; ".join(reasons)
        else:
            stages[name] = tuple(replace(run, stage=name) for run in module.plan(context))
    if not set(stages) & set(config.run.stage):
        reasons_text = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise NothingToVerify(f"no asked stage is in the port's scope ({reasons_text})")
    return Plan(
        config=config,
        checkpoint=checkpoint,
        info=info,
        setups=setups,
        described=described,
        scope=scope,
        context=context,
        stages=stages,
        skipped=skipped,
        digests={
            "checkpoint": carried.digests["checkpoint"] if carried else checkpoint_digest(checkpoint),
            "config": config.digest,
            "port": code_digest(config.accel.spec),
            "reference": carried.digests["reference"] if carried else code_digest(config.reference.spec),
            "versions": digest_of([described[side].get("versions", {}) for side in ("reference", "accel")]),
        },
        carried=carried,
        stand_in=stand_in,
        cut=read_cut(checkpoint),
    )


def declared(scope: Scope, words: Mapping[str, str]) -> Scope:
    """Return a scope with what the user declares of the port's numbers put over its own words.

    A port that rounds weights, inputs or caches has no float32 run that could be judged more sharply; of a state, the
    storage alone is declared, and what it is computed in is seen there.
    Raises SpecError for a word that is not in the language.
    """
    precision = parse_precision({**scope.precision, **words}).words()
    if not precision:
        return replace(scope, precision={})
    rounds = {key: value for key, value in precision.items() if key in ("weights", "activations", "cache")}
    if not rounds:
        return replace(scope, precision=precision)
    told = ", ".join(f"{key} {value}" for key, value in rounds.items())
    off = {**scope.off, "float32": f"the port declares {told}; it computes so in every dtype"}
    return replace(scope, precision=precision, precisions=(), off=off)


def _floor_as_declared(
    setups: Mapping[str, Setup], scope: Scope, reference: Sequence[str], carried: Carried | None
) -> dict[str, Setup]:
    """Return the setups with the floor in the declared precision, where the reference can compute so."""
    if carried is not None:
        return dict(setups)
    precision = scope.precision if "precision" in reference else {}
    return {**setups, "floor": replace(setups["floor"], precision=precision)}


def goldens_folder(config: Config) -> Path:
    """Return where goldens are kept: --goldens, or the user's cache."""
    if config.run.goldens is not None:
        return config.run.goldens.resolve()
    return cache_folder("goldens")


def cache_folder(name: str) -> Path:
    """Return a folder of the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "day0" / name


def out_of_scope(word: str, scope: Scope, capabilities: Sequence[str] | frozenset[str]) -> str:
    """Return why a feature (`image`, `weights`, `multi_card`, ...) is outside the scope, or an empty string."""
    if word in scope.off:
        return f"{word} is switched off: {scope.off[word]}"
    claims = {
        "text": scope.text,
        "image": scope.image,
        "multi_card": "multi_card" in capabilities and any(layout.world_size > 1 for layout in scope.layouts),
        "replay": scope.replay,
        "serves": scope.serves and "serves" in capabilities,
        "chat": "chat" in capabilities,
        "float32": "float32" in scope.precisions,
    }
    if word in claims:
        return "" if claims[word] else f"the port does not claim {word}"
    if word == "accelerator" and word not in capabilities:
        return "the port runs on a plain CPU: memory statistics, streams and events of a device do not apply"
    if word in ("phases", "weights", "cache", "compiled", "converts"):
        return "" if word in capabilities else f"the port's adapter has no capability {word!r}"
    return ""


def out_of_judgement(
    word: str,
    info: ModelInfo,
    scope: Scope,
    capabilities: frozenset[str],
    *,
    oracles: Iterable[Trace],
    ports: Iterable[Trace] = (),
) -> str:
    """Return why criteria that need a feature judge nothing here, or an empty string.

    As `out_of_scope`, and for what the model, the oracle's own traces and the port's decide: experts, decisions,
    operators that torch can see.
    """
    if word == "experts":
        return "" if info.experts else "the model has no experts"
    if word != "decisions":
        reason = out_of_scope(word, scope, capabilities)
        return reason or (_unseen_operators(ports) if word == "operators" else "")
    taps = {tap.name: tap for trace in oracles for tap in trace.taps.values()}
    made = [name for name, tap in taps.items() if tap.kind in DECISION_KINDS]
    hidden = scope.unobservable
    if not made:
        return "the reference makes no decisions (no router, no indexer)"
    if not hidden or any(not matches(name, hidden) for name in made):
        return ""
    return f"every decision is declared unobservable: {'; '.join(sorted(set(hidden.values())))}"


def _unseen_operators(ports: Iterable[Trace]) -> str:
    """Return why no operator could be tested alone, where the port ran without one that torch can see."""
    suites = [trace.facts for trace in ports if trace.run.kind == "operators"]
    if not suites or any(result["needed"] for facts in suites for result in facts["results"]):
        return ""
    return "the port computes outside of torch, and offers no operators to be tested alone"


def refused(answer: Mapping[str, Any] | Failure, side: str) -> Mapping[str, Any]:
    """Return what a side said of itself, or a stand-in for one that failed, so that the failure is reported."""
    if isinstance(answer, Failure):
        return {"name": side, "scope": {}, "capabilities": [], "versions": {}, "failure": answer}
    return answer


def widest_port(reference: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a port that claims all that its reference, opened as a port, can answer for would say of itself."""
    scope = from_json(Scope, reference["scope"])
    wide = replace(
        scope, replay=True, serves=False, phases=("prefill", "chunked", "decode"), layouts=(Layout(), Layout(tp=2)),
        unobservable={}, off={},
    )  # fmt: skip
    capable = sorted({*reference["capabilities"], "phases", "multi_card"})
    return {**reference, "name": "any port", "scope": as_json(wide), "capabilities": capable}


def code_digest(spec: str) -> str:
    """Return a digest of a SPEC and of the code that it names: its file, or its package's files."""
    digest = hashlib.blake2b(anchor_spec(spec, Path.cwd()).encode(), digest_size=16)
    for path in _code_files(parse_spec(spec)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _code_files(spec: Spec) -> list[Path]:
    """Return the Python files of a port, in order; of recordings their manifests, which hold every digest."""
    if spec.kind == "traces":
        mapping = [Path(spec.options["map"]).expanduser()] if "map" in spec.options else []
        return [*sorted(Path(spec.target).expanduser().rglob("manifest.json")), *(m for m in mapping if m.is_file())]
    module = spec.target.rpartition(":")[0] or spec.target
    if spec.kind == "builtin":
        named = metadata.entry_points(group="day0.adapters", name=spec.target)
        module = next((entry.value.partition(":")[0] for entry in named), "")
    if module.endswith(".py"):
        return [Path(module)] if Path(module).is_file() else []
    if spec.kind not in ("builtin", "factory") or not module:
        return []
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return []
    origin = Path(found.origin) if found and found.origin else Path()
    return sorted(origin.parent.glob("*.py")) if origin.name == "__init__.py" else [origin] if origin.is_file() else []


def _spec_text(config: Config, side: str) -> str:
    return config.accel.spec if side == "accel" else config.reference.spec
