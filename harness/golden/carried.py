"""A reference that travels with its goldens: what a plan needs where it cannot run. Must not know plans.

<goldens>/<base>/reference-<dtype>.json   what the reference said of itself, its setups, digests, who recorded when
                 reference-<dtype>-<digest>.json, for ports that declare a precision beside their dtype
<goldens>/<base>/checkpoint/...           the checkpoint's words (config.json, tokenizer): no weights
<goldens>/<base>/<role>/<run>/...         its traces
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import recorder
from harness.errors import TraceError
from harness.golden.store import FORMAT as TRACE_FORMAT
from harness.golden.store import publish
from harness.types import Setup, as_json, digest_of, from_json

FORMAT = "day0.goldens/1"
WORDS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "special_tokens_map.json", "preprocessor_config.json", "day0-cut.json",
)  # fmt: skip
"""Files of a checkpoint that travel: what planning and the text front end need."""
WORDS_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """A reference as it was recorded.

    `described` is what its worker said (name, scope, capabilities, versions, device); `setups` are those of oracle and
    floor; `digests` those of its checkpoint and its code; `made` says who recorded it, when and for what port.
    """

    spec: str
    described: Mapping[str, Any]
    setups: Mapping[str, Setup]
    digests: Mapping[str, str]
    made: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path()

    @property
    def checkpoint(self) -> Path:
        """The folder with the checkpoint's words."""
        return self.folder / "checkpoint"


def checkpoint_digest(checkpoint: Path) -> str:
    """Return the cheap digest of a checkpoint: configuration, headers, sizes and sampled bytes."""
    from harness.checkpoint import open_checkpoint  # a worker that only writes traces has no need of it

    config = checkpoint / "config.json"
    return digest_of([config.read_text() if config.is_file() else "", open_checkpoint(checkpoint).digest])


def save_carried(carried: Carried, checkpoint: Path) -> None:
    """Write a reference's own words beside its traces, one file for each precision of a port."""
    folder = carried.folder
    scratch = folder / ".checkpoint"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for name in WORDS:
        source = checkpoint / name
        if source.is_file() and source.stat().st_size <= WORDS_BYTES:
            shutil.copyfile(source, scratch / name)
    files = {path.name: _file_digest(path) for path in sorted(scratch.iterdir())}
    publish(scratch, carried.checkpoint)
    words = {
        "format": FORMAT,
        "traces": TRACE_FORMAT,
        "recorder": recorder.VERSION,
        "files": files,
        **{name: as_json(getattr(carried, name)) for name in ("spec", "described", "setups", "digests", "made")},
    }
    floor = carried.setups["floor"]
    declared = f"-{digest_of(as_json(floor.precision))[:8]}" if floor.precision else ""
    path = folder / f"reference-{floor.dtype}{declared}.json"
    scrap = folder / f".{path.name}"
    scrap.write_text(json.dumps({**words, "seal": digest_of(words)}, indent=1))
    scrap.replace(path)


def load_carried(goldens: Path) -> list[Carried]:
    """Return the references that a folder of goldens holds, none for a plain cache of traces. Raises TraceError."""
    found = sorted(goldens.glob("*/reference-*.json")) if goldens.is_dir() else []
    return [_load(path) for path in found]


def _load(path: Path) -> Carried:
    again = "record the goldens again with `day0 record`"
    try:
        words = json.loads(path.read_text())
        seal = words.pop("seal")
        whole = digest_of(words)
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise TraceError(f"expected what was recorded of a reference at {path}, found: {error!r}; {again}") from error
    if words.get("format") != FORMAT:
        raise TraceError(f"expected format {FORMAT!r} in {path}, found {words.get('format')!r}; {again}")
    if seal != whole:
        raise TraceError(f"{path} was changed after it was written (expected seal {seal}); do not use it, {again}")
    stale = [
        f"{what} {words.get(key)!r}, this version has {here!r}"
        for key, what, here in (
            ("traces", "the trace format", TRACE_FORMAT), ("recorder", "the recorder's version", recorder.VERSION),
        )
        if words.get(key) != here
    ]  # fmt: skip
    if stale:
        raise TraceError(f"the goldens at {path.parent} are stale: they hold {'; '.join(stale)}; {again}")
    for name, digest in words["files"].items():
        file = path.parent / "checkpoint" / Path(name).name
        if not file.is_file() or _file_digest(file) != digest:
            raise TraceError(f"expected {file} as it was recorded, found it changed or missing; {again}")
    setups = {role: from_json(Setup, setup) for role, setup in words["setups"].items()}
    kept = {key: words[key] for key in ("spec", "described", "digests", "made")}
    return Carried(setups=setups, folder=path.parent, **kept)


def choose_carried(carried: Sequence[Carried], *, checkpoint: str, dtype: str, precision: Mapping[str, str]) -> Carried:
    """Return the reference recorded for a port of a dtype and precision, of a checkpoint (its digest; empty: any).

    Raises TraceError saying what is there instead.
    """
    fit = [c for c in carried if not checkpoint or c.digests["checkpoint"] == checkpoint]
    if not fit:
        there = ", ".join(sorted(f"{c.digests['checkpoint'][:12]} ({c.spec})" for c in carried))
        raise TraceError(
            f"the goldens are of another checkpoint: expected digest {checkpoint[:12]}, found {there}. Bring the "
            "checkpoint that they were recorded from (--set run.checkpoint=FOLDER), or record them again from this one"
        )
    exact = [c for c in fit if c.setups["floor"].dtype == dtype]
    if not exact:
        there = ", ".join(sorted({c.setups["floor"].dtype for c in fit}))
        raise TraceError(
            f"the goldens are for ports in {there}, expected {dtype}; record them with --set accel.dtype={dtype}, or "
            f"declare the port's precision"
        )
    same = [c for c in exact if dict(c.setups["floor"].precision) == dict(precision)]
    if not same:
        there = "; ".join(sorted({_words(c.setups["floor"].precision) for c in exact}))
        raise TraceError(
            f"the goldens are for ports that declare {there}, expected {_words(precision)}; record them with the "
            "port's own [accel.precision], or declare what they were recorded for"
        )
    exact = same
    if len(exact) > 1:
        there = ", ".join(sorted(c.spec for c in exact))
        raise TraceError(f"the goldens hold {len(exact)} references ({there}); name one folder for each")
    return exact[0]


def _words(precision: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in precision.items()) or "nothing beside the dtype"


def _file_digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
