"""`day0 prove --checkpoints`: damages to each format, and ports that misread it. Knows tables; must not know limits.

The second opinion beside each row is that of transformers on the same folder, where it is asked for and installed.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness.errors import EXIT_REFUSED, UsageError, nearest
from harness.faults.disk import DAMAGES, HARMLESS
from harness.faults.disk.damage import Damage
from harness.faults.disk.judge import DiskRow, Shelf
from harness.faults.disk.mistakes import MISTAKES, Mistake
from harness.faults.disk.ports import PortShelf
from harness.faults.disk.table import as_data, failed, line, markdown
from harness.faults.disk.writers import FORMATS


def run(
    *,
    formats: str,
    only: str,
    seed: int,
    beside: bool,
    out: Path | None,
    json_file: Path | None,
    say: Callable[[str], None],
) -> tuple[list[DiskRow], int]:
    """Damage the checkpoints, write what is asked for, and return the rows and the exit code.

    `beside`: ask transformers too. Raises UsageError for unknown words.
    """
    names = _known(formats, FORMATS, "format") or list(FORMATS)
    everything = {**DAMAGES, **HARMLESS, **MISTAKES}
    asked = _known(only, everything, "damage") or list(everything)
    chosen = [d for name, d in {**DAMAGES, **HARMLESS}.items() if name in asked]
    wrong: list[Mistake | None] = [m for name, m in MISTAKES.items() if name in asked]
    wrong = [None, *wrong] if not only else wrong
    if beside and importlib.util.find_spec("transformers") is None:
        raise UsageError("--beside needs transformers; pip install 'day0[hf]'")
    rows: list[DiskRow] = []
    with tempfile.TemporaryDirectory(prefix="day0-prove-") as scratch:
        for name in names:
            say(f"{name}: {len(chosen)} damages and harmless differences, {len(wrong)} ports")
            rows += _shelf(Shelf(name, Path(scratch), seed), chosen, beside, say) if chosen else []
            port = PortShelf(name, Path(scratch), seed) if wrong else None
            rows += [port.row(m) for m in wrong] if port is not None else []
            _write(rows, out, json_file, {"seed": seed, "formats": names})
    return rows, EXIT_REFUSED if failed(rows) else 0


def _write(rows: Sequence[DiskRow], out: Path | None, json_file: Path | None, about: Mapping[str, object]) -> None:
    """Write what is known so far, where it is wanted."""
    if json_file is not None:
        json_file.write_text(as_data(rows, **about))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "prove-checkpoints.json").write_text(as_data(rows, **about))
        (out / "prove-checkpoints.md").write_text(markdown(rows))


def _shelf(shelf: Shelf, chosen: Sequence[Damage], beside: bool, say: Callable[[str], None]) -> list[DiskRow]:
    other = None
    if beside:
        from harness.faults.disk.second import SecondOpinion

        other = SecondOpinion(shelf.clean)
    rows = []
    for damage in chosen:
        row = shelf.row(damage, other)
        rows.append(row)
        if failed([row]):
            say(line(row))
    return rows


def _known(words: str, table: Mapping[str, object], what: str) -> list[str]:
    found = [w.strip() for w in words.split(",") if w.strip()]
    for word in found:
        if word not in table:
            raise UsageError(f"unknown {what} {word!r}{nearest(word, list(table))}")
    return found
