"""Show an inspection of a checkpoint. Knows its JSON; must not know how it came about."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.checkpoint import Checkpoint
from harness.checkpoint.needed import size
from harness.checkpoint.scan import content_facts

_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
_SHOWN, _RANKS_SHOWN, _PLAIN_WIDTH = 6, 16, 160
LOG_EVERY_S = 10.0


def show_inspection(inspection: Mapping[str, Any]) -> None:
    """Print an inspection, in colours on a terminal and plain elsewhere."""
    plain = not sys.stdout.isatty()
    Console(width=_PLAIN_WIDTH if plain else None, no_color=plain or None).print(inspection_view(inspection))


def reading(*, manifest: Path | None, state: Path | None) -> Callable[[Checkpoint], dict[str, Any]]:
    """Return how to read a checkpoint's content while telling how far it is: a line that moves, or lines in a log."""
    console = Console(stderr=True)

    def noted(words: str) -> None:
        console.print(words, markup=False, highlight=False)

    def read(checkpoint: Checkpoint) -> dict[str, Any]:
        if not console.is_terminal:
            told = _now_and_then(console)
            return content_facts(checkpoint, manifest=manifest, state=state, told=told, noted=noted)
        with console.status("reading") as status:
            return content_facts(checkpoint, manifest=manifest, state=state, told=status.update, noted=noted)

    return read


def _now_and_then(console: Console) -> Callable[[str], None]:
    last = time.monotonic()

    def told(words: str) -> None:
        nonlocal last
        if time.monotonic() - last >= LOG_EVERY_S:
            last = time.monotonic()
            console.print(words)

    return told


def count(number: float) -> str:
    """Return a count as a person reads it: 671.0 B."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return f"{number:.0f}"


def inspection_view(inspection: Mapping[str, Any]) -> RenderableType:
    """Return the whole inspection: what it is, where its bytes are, what it takes, what is wrong."""
    said = inspection["quantisation"]
    words = " ".join([said["method"] or "no quantisation", *said["formats"]])
    head = (
        f"{inspection['checkpoint']}\n{inspection['tensors']} tensors in {inspection['shards']} files, "
        f"{size(inspection['bytes'])}, {count(inspection['parameters'])} parameters; the configuration says: {words}"
    )
    return Group(
        Text(head), Text(), _parts(inspection), Text(), _formats(inspection), Text(), _biggest(inspection), Text(),
        *_plan(inspection["plan"]), Text(), *_content(inspection.get("content")), *_problems(inspection),
    )  # fmt: skip


def _content(content: Mapping[str, Any] | None) -> list[RenderableType]:
    if content is None:
        return []
    rate = size(content["read_bytes"] / max(content["seconds"], 1e-9))
    vouched, files = len(content["vouched"]), len(content["digests"])
    lines = [
        f"read {size(content['read_bytes'])} in {content['seconds']:.1f} s ({rate}/s), {content['matrices']} matrices"
    ]
    if content["reused"]:
        lines.append(f"{len(content['reused'])} unchanged files were read before: {size(content['bytes'])} in all")
    lines.append(
        f"{vouched} of {files} files have the digest that was published" if vouched else "no digest was published"
    )
    conversion = content["conversion"]
    if conversion["blocks"]:
        lines.append(f"{conversion['lossy_blocks']} of {conversion['blocks']} MXFP4 blocks change in FP8 (128x128)")
    return [Text("\n".join(lines)), Text()]


def _table(*headings: str, left: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", overflow="fold")
    return table


def _parts(inspection: Mapping[str, Any]) -> Table:
    table = _table("part", "tensors", "parameters", "bytes", left=("part",))
    for part, row in inspection["parts"].items():
        table.add_row(part, str(row["tensors"]), count(row["parameters"]), size(row["bytes"]))
    return table


def _formats(inspection: Mapping[str, Any]) -> Table:
    table = _table("format", "weights", "parameters", "bytes", "in", left=("format", "in"))
    for name, row in inspection["formats"].items():
        where = ", ".join(row["parts"])
        table.add_row(name, str(row["weights"]), count(row["parameters"]), size(row["bytes"]), Text(where))
    stored = ", ".join(f"{dtype} {size(nbytes)}" for dtype, nbytes in inspection["dtypes"].items())
    table.caption, table.caption_justify = Text(f"stored as: {stored}"), "left"
    return table


def _biggest(inspection: Mapping[str, Any]) -> Table:
    table = _table("largest tensors", "dtype", "shape", "bytes", left=("largest tensors", "dtype"))
    for row in inspection["biggest"][:_SHOWN]:
        shape = "x".join(str(n) for n in row["shape"])
        table.add_row(Text(row["tensor"]), row["dtype"], shape, size(row["bytes"]))
    return table


def _plan(plan: Mapping[str, Any]) -> list[RenderableType]:
    layout, cache, workspace = plan["layout"], plan["cache"], plan["workspace"]
    degrees = " ".join(f"{k}{v}" for k, v in layout.items())
    kinds = ", ".join(f"{row['count']} {row['kind']}" for row in cache["layers"])
    lines = [
        f"plan for {degrees}, {plan['context']} tokens: cache {size(cache['bytes_per_token'])} a token, "
        f"{size(cache['bytes_per_request'])} a request ({kinds})",
        f"conversion: {size(workspace['decode_bytes'])} for the largest quantised weight"
        + (
            f", {size(workspace['layer_fp8_bytes'])} for a layer of experts in FP8" * bool(workspace["layer_fp8_bytes"])
        ),
        *(f"not known: {what}" for what in cache["unknown"]),
    ]
    table = _table("ranks", "layers", "weights", "cache", "workspace", "all", "fits", left=("ranks", "fits"))
    for first, last, row in _alike(plan["ranks"])[:_RANKS_SHOWN]:
        fits = {None: "", True: "yes", False: "no"}[row["fits"]]
        card = f"{fits} (of {plan['card_gib']:g} GiB)" if fits else ""
        layers = f"{row['layers'][0]}-{row['layers'][1] - 1}" if row["layers"][1] > row["layers"][0] else "none"
        table.add_row(
            f"{first}-{last}" if last > first else f"{first}", layers, size(row["weight_bytes"]),
            size(row["cache_bytes"]), size(row["workspace_bytes"]), size(row["total_bytes"]),
            Text(card, style="bold red" if fits == "no" else ""),
        )  # fmt: skip
    return [*(Text(line) for line in lines), table, *(Text(f"assumed: {a}", style="dim") for a in plan["assumed"])]


def _alike(ranks: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, Mapping[str, Any]]]:
    """Gather neighbouring ranks that hold as much."""
    found: list[tuple[int, int, Mapping[str, Any]]] = []
    for row in ranks:
        key = (row["layers"], row["weight_bytes"], row["cache_bytes"])
        if found and (found[-1][2]["layers"], found[-1][2]["weight_bytes"], found[-1][2]["cache_bytes"]) == key:
            found[-1] = (found[-1][0], row["rank"], row)
        else:
            found.append((row["rank"], row["rank"], row))
    return found


def _problems(inspection: Mapping[str, Any]) -> list[RenderableType]:
    problems = inspection["problems"]
    if not problems:
        where = (
            "headers, index, configuration and content"
            if "content" in inspection
            else "headers, index and configuration"
        )
        return [Text(f"no problem found in {where}", style="green")]
    lines: list[RenderableType] = []
    shown: Counter[str] = Counter()
    for problem in problems:
        shown[problem["kind"]] += 1
        if shown[problem["kind"]] <= _SHOWN:
            place = f" ({problem['file']}{_at(problem['offset'])})" if problem["file"] else ""
            text = f"{problem['severity']}: {problem['kind']}: {problem['tensor']}{place}: {problem['message']}"
            lines.append(Text(text, style=_STYLES[problem["severity"]]))
    for kind, n in shown.items():
        if n > _SHOWN:
            lines.append(Text(f"and {n - _SHOWN} more of {kind}"))
    totals = Counter(p["severity"] for p in problems)
    lines.append(Text(", ".join(f"{n} {severity}{'s' if n > 1 else ''}" for severity, n in totals.items())))
    return lines


def _at(offset: int | None) -> str:
    return f" at byte {offset}" if offset is not None else ""
