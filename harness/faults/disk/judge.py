"""Every damage to the files of every format, looked at as `day0 inspect` does, and scored. Must not know limits.

Checks come from the cheapest: headers with index and configuration, one pass over the content, its suspicions, and last
a manifest that was recorded while the files were whole.
"""

from __future__ import annotations

import fnmatch
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.checkpoint import open_checkpoint
from harness.checkpoint.problems import checkpoint_problems
from harness.checkpoint.scan import content_facts
from harness.checkpoint.scan.manifest import manifest_text
from harness.errors import CheckpointError
from harness.faults.catalogue import NoPlace
from harness.faults.disk import writers
from harness.faults.disk.damage import CHECKS, Damage
from harness.faults.disk.files import Files
from harness.types import as_json

NOWHERE = "nowhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One thing that a check said. `severity`: error, warning, suspicion or note."""

    check: str
    severity: str
    kind: str
    name: str
    file: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRow:
    """How one damage to one format ended. `outcome`: detected, late (by a costlier check than promised), missed,
    accepted, alarmed, no place.

    `seen` is the check that saw it first, `severity` the worst of what it said. `place_right`: a tensor or file that
    was damaged is named; `cause_right`: the words fit. `others` is what another loader says of the same folder.
    """

    format: str
    name: str
    says: str
    kind: str
    expected: str = ""
    outcome: str = ""
    seen: str = ""
    severity: str = ""
    place: str = ""
    message: str = ""
    place_right: bool | None = None
    cause_right: bool | None = None
    note: str = ""
    others: str = ""
    wall_s: float = 0.0


class Shelf:
    """One format: its right checkpoint on disk, and the manifest that was recorded of it."""

    def __init__(self, name: str, scratch: Path, seed: int = 0) -> None:
        self.name, self.scratch = name, scratch
        self.files = writers.write(name, seed)
        self.clean = self.files.write(scratch / name / "clean")
        self.manifest = scratch / name / "manifest.json"
        self.manifest.write_text(manifest_text(content_facts(open_checkpoint(self.clean), values=False)["digests"]))
        self._count = 0

    def broken(self, damage: Damage) -> tuple[Path, list[str]]:
        """Write a folder with a damage, and return it with the places that may be named. Raises NoPlace."""
        files = self.files.copy()
        places = damage.inflict(files)
        self._count += 1
        return self._written(files), places

    def _written(self, files: Files) -> Path:
        return files.write(
            self.scratch / self.name / str(self._count) / "main", clean=self.files, beside=self.clean
        )  # fmt: skip

    def sweep(self) -> None:
        """Remove what was written last."""
        shutil.rmtree(self.scratch / self.name / str(self._count), ignore_errors=True)

    def row(self, damage: Damage, other: Callable[[Path], str] | None = None) -> DiskRow:
        """Damage the files and say which check sees it; `other` says what another loader makes of the folder."""
        begin = time.perf_counter()
        row = DiskRow(
            format=self.name, name=damage.name, says=damage.says, kind="fault" if damage.seen else "benign",
            expected=damage.seen,
        )  # fmt: skip
        try:
            folder, places = self.broken(damage)
        except NoPlace as why:
            return replace(row, outcome="no place", note=str(why))
        row = _harmless(row, damage, folder) if not damage.seen else _fault(row, damage, folder, places, self.manifest)
        row = replace(row, wall_s=time.perf_counter() - begin, others=other(folder) if other is not None else "")
        self.sweep()
        return row


def _fault(row: DiskRow, damage: Damage, folder: Path, places: Sequence[str], manifest: Path) -> DiskRow:
    for check, said in looked_at(folder, manifest):
        if not said:
            continue
        at = [s for s in said if _named(s, places)]
        best = next((s for s in at if _fits(s, damage.cause)), (at or said)[0])
        late = CHECKS.index(check) > CHECKS.index(damage.seen)
        return replace(
            row, outcome="late" if late else "detected", seen=check, severity=said[0].severity,
            place=best.name or best.file, message=f"{best.kind}: {best.message}", place_right=bool(at),
            cause_right=_fits(best, damage.cause),
        )  # fmt: skip
    return replace(row, outcome="missed", seen=NOWHERE)


def _harmless(row: DiskRow, damage: Damage, folder: Path) -> DiskRow:
    """Look with every check but the manifest: nothing may be said beyond notes, and these must give the reason."""
    notes: list[Said] = []
    for check, said in looked_at(folder, None, notes):
        if said:
            first = said[0]
            return replace(
                row, outcome="alarmed", seen=check, severity=first.severity, place=first.name or first.file,
                message=f"{first.kind}: {first.message}",
            )  # fmt: skip
    fits = all(_fits(n, damage.cause) for n in notes) and bool(notes) == bool(damage.cause)
    message = f"{notes[0].kind}: {notes[0].message}" if notes else ""
    return replace(row, outcome="accepted", severity="note" if notes else "", message=message, cause_right=fits)


def _named(said: Said, places: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(x, place) for x in (said.name, said.file) if x for place in places)


def _fits(said: Said, words: Sequence[str]) -> bool:
    return any(re.search(word, f"{said.kind} {said.message}", re.IGNORECASE) for word in words)


def looked_at(folder: Path, manifest: Path | None, notes: list[Said] | None = None) -> Iterator[tuple[str, list[Said]]]:
    """Yield what each check says of a folder, from the cheapest; notes are put aside."""
    try:
        checkpoint = open_checkpoint(folder)
    except CheckpointError as error:
        yield "headers", [Said(check="headers", severity="error", kind="none", name="", file=_file_in(str(error)),
                               message=str(error))]  # fmt: skip
        return
    problems = [_said("headers", as_json(p)) for p in checkpoint_problems(checkpoint)]
    if notes is not None:
        notes += [p for p in problems if p.severity == "note"]
    yield "headers", [p for p in problems if p.severity != "note"]
    facts = content_facts(checkpoint, manifest=manifest)
    seen = [p for p in facts["problems"] if p["severity"] != "note"]
    yield "content", [_said("content", p) for p in seen if p["kind"] != "digest"]
    yield "suspicion", [
        Said(check="suspicion", severity="suspicion", kind=s["kind"], name=s["name"], file=s["file"],
             message=s["message"])
        for s in facts["suspicions"]
    ]  # fmt: skip
    yield "manifest", [_said("manifest", p) for p in seen if p["kind"] == "digest"]


def _said(check: str, problem: Mapping[str, Any]) -> Said:
    message = f"expected {problem['expected']}, found {problem['found']}"
    return Said(check=check, severity=problem["severity"], kind=problem["kind"], name=problem["name"],
                file=problem["file"], message=message)  # fmt: skip


def _file_in(message: str) -> str:
    found = re.search(r"[\w.-]+\.(?:json|safetensors)", message)
    return found.group() if found else ""
