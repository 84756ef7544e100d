"""`day0 prove`: which injections on which architectures, and what is written. Knows the catalogue and the bench."""

from __future__ import annotations

import importlib.util
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.checklist import load_checklists
from harness.errors import EXIT_REFUSED, UsageError, nearest
from harness.faults import TABLE, models
from harness.faults.bench import Proof, Row, prove
from harness.faults.catalogue import Injection
from harness.faults.jobs import jobs_at_once, rows_of
from harness.faults.kernels import VIA
from harness.faults.kernels.prove import NAME as OPERATORS
from harness.faults.kernels.prove import prove_kernels
from harness.faults.lab import Subject, make_lab
from harness.faults.pending import PENDING
from harness.faults.table import as_data, failed, line, markdown
from harness.plugins import default_checkpoint, parse_spec

BUILTIN = "builtin"
ARCHITECTURES = (
    BUILTIN, "llama", "qwen3_moe", "gpt_oss", "deepseek_v3", "deepseek_v32", "kimi_linear", "qwen3_next", "glm5_next",
    "inkling2", "qwen3_vl_moe", OPERATORS,
)  # fmt: skip
SAMPLED = ("gpt_oss", "deepseek_v32", "kimi_linear", "qwen3_vl_moe", BUILTIN, OPERATORS)
"""Architectures of a sample: sinks and windows, sparse, recurrent, pictures, a port that is no module; and operators
alone, which are no architecture: kernels are exchanged before the operator suite, each of which is tried."""
SAMPLE = {"fault": 7, "benign": 1}
"""Injections of a sample for each of them, of those that have a place there."""


def run(
    *, everything: bool, architectures: str, only: str, seed: int, jobs: int, out: Path | None, json_file: Path | None,
    say: Callable[[str], None],
) -> tuple[list[Row], int]:  # fmt: skip
    """Prove, write what is asked for, and return the rows and the exit code. Raises UsageError for unknown words."""
    wanted = _wanted(only)
    names = _architectures(architectures, everything, say)
    names = [name for name in names if any(row.via == _way(name) for row in wanted or TABLE.rows.values())]
    if not names:
        raise UsageError("nothing to try: none of these injections gets into these architectures")
    rows: list[Row] = []
    about = {"seed": seed, "architectures": names, "everything": everything}
    at_once = jobs_at_once(jobs, len(names))
    with tempfile.TemporaryDirectory(prefix="day0-prove-") as scratch:
        if at_once > 1:
            words = ["--seed", str(seed), *(["--all"] if everything else []), *(["--only", only] if only else [])]
            rows = rows_of(names, words, at_once=at_once, scratch=Path(scratch), say=say)
        for name in names if at_once == 1 else ():
            if name == OPERATORS:
                rows += prove_kernels(_operators(wanted), lambda row: say(line(row)))
                _write(rows, out, json_file, about)
                continue
            subject = _subject(name, Path(scratch), seed)
            for chosen in _chosen(name, wanted, everything, seed):
                said = ", ".join(f"{key} {value}" for key, value in chosen[0].declares.items())
                say(f"{name}: recording the reference{f' with {said}' if said else ''}")
                proof = Proof(make_lab(replace(subject, precision=chosen[0].declares), load_checklists()))
                sample = None if everything or wanted else SAMPLE
                rows += prove(proof, chosen, lambda row: say(line(row)), sample)
                proof.close()
                _write(rows, out, json_file, about)
    _write(rows, out, json_file, about)
    return rows, EXIT_REFUSED if failed(rows) else 0


def _way(name: str) -> str:
    """Return how injections get into an architecture's port."""
    return {BUILTIN: "taps", OPERATORS: VIA}.get(name, "module")


def _operators(wanted: Sequence[Injection]) -> list[Injection]:
    return [row for row in wanted or TABLE.rows.values() if row.via == VIA]


def _chosen(name: str, wanted: Sequence[Injection], everything: bool, seed: int) -> list[list[Injection]]:
    """Return the injections of one architecture, those of ports that declare the same together.

    They are what was named, everything, or a sample, which leaves out what needs goldens of its own.
    """
    sample = not everything and not wanted
    known = wanted or (_shuffled(name, seed) if sample else list(TABLE.rows.values()))
    chosen = [row for row in known if row.via == _way(name) and not (sample and row.declares)]
    groups: dict[tuple[tuple[str, str], ...], list[Injection]] = {}
    for row in chosen:
        groups.setdefault(tuple(sorted(row.declares.items())), []).append(row)
    return list(groups.values())


def _write(rows: Sequence[Row], out: Path | None, json_file: Path | None, about: Mapping[str, Any]) -> None:
    """Write what is known so far, where it is wanted."""
    text = as_data(rows, PENDING, **about)
    if json_file is not None:
        json_file.write_text(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "prove.json").write_text(text)
        (out / "prove.md").write_text(markdown(rows, PENDING))


def _architectures(words: str, everything: bool, say: Callable[[str], None]) -> list[str]:
    """Return the architectures to prove on. Raises UsageError for one that is not known, or cannot be built here."""
    asked = [w.strip() for w in words.split(",") if w.strip()]
    for word in asked:
        if word not in ARCHITECTURES:
            raise UsageError(f"unknown architecture {word!r}{nearest(word, list(ARCHITECTURES))}")
    names = asked or list(ARCHITECTURES if everything else SAMPLED)
    if importlib.util.find_spec("transformers") is None:
        missing = [n for n in names if n not in (BUILTIN, OPERATORS)]
        if asked and missing:
            raise UsageError(f"{', '.join(missing)}: needs transformers; pip install 'day0[hf]'")
        say("transformers is not installed (pip install 'day0[hf]'): only the built-in pair and operators are proved")
        names = [BUILTIN, OPERATORS]
    return names


def _wanted(words: str) -> list[Injection]:
    """Return the injections that are named by id or by name. Raises UsageError for one that is not known."""
    found: list[Injection] = []
    pending = {p.id: p for p in PENDING}
    for word in (w.strip() for w in words.split(",") if w.strip()):
        named = [row for row in TABLE.rows.values() if word in (row.name, row.id)]
        if not named and word in pending:
            raise UsageError(f"{word} is pending: {pending[word].says}: {pending[word].why}")
        if not named:
            known = sorted({w for row in TABLE.rows.values() for w in (row.name, row.id)})
            raise UsageError(f"unknown injection {word!r}{_near(word, known)}; --all tries every one")
        found += named
    return found


def _near(word: str, known: list[str]) -> str:
    hint = nearest(word, known)
    return hint if len(hint) < 80 else ""


def _shuffled(name: str, seed: int) -> list[Injection]:
    """Return all injections in an order that differs from architecture to architecture.

    What only a long context shows costs most, and is left to the whole.
    """
    rows = [row for row in TABLE.rows.values() if "long_context" not in row.stages]
    random.Random(f"prove-{seed}-{name}").shuffle(rows)
    return rows


def _subject(name: str, scratch: Path, seed: int) -> Subject:
    """Return what an architecture is proved on; a small random model is made for it."""
    if name == BUILTIN:
        spec = "builtin:reference"
        checkpoint = default_checkpoint(parse_spec(spec))
        assert checkpoint is not None
        return Subject(name=name, checkpoint=checkpoint, reference=spec, accel="builtin:accel")
    folder = models.build(name, scratch / name, seed=seed)
    spec = f"hf:{folder}?attn=eager"
    return Subject(name=name, checkpoint=folder, reference=spec, accel=spec)


def quiet() -> None:
    """Keep a model library's own progress out of the way, and small operations on few threads."""
    import logging
    import os

    import torch

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if importlib.util.find_spec("transformers") is not None:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
