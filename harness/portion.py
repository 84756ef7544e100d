"""Part of a model in place of the whole: sides that are given a cut, or a random, checkpoint. Must not know runs.

`--layers` and `--random-weights` write a checkpoint folder into the user's cache, once, and name it in both SPECs; from
there on it is a checkpoint like any other, for a transformers folder, a factory's module, or a command that serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.checkpoint import open_checkpoint
from harness.checkpoint.cut import Plan, Told, plan_cut, write_cut
from harness.checkpoint.needed import size
from harness.config import Config
from harness.errors import UsageError
from harness.plan import cache_folder, reference_named
from harness.plugins import Spec, default_checkpoint, parse_spec
from harness.unreleased import lists_of, plan_random

LOG_EVERY_S = 10.0

Say = Callable[[str], None]


def prepared(config: Config, say: Say, *, scratch: Path | None = None) -> Config:
    """Return a configuration whose sides run on the asked part of their checkpoints; write what is not there yet.

    In `scratch`, where it is given, nothing but headers is written: enough to plan with.
    Raises UsageError where a side cannot be given another checkpoint, or the layers are no model of their own.
    """
    if config.run.layers is None and not config.run.random_weights:
        return config
    made: dict[Path, Path] = {}

    def part(source: Path) -> Path:
        source = source.resolve()
        if source not in made:
            made[source] = _made(config, source, say, scratch)
        return made[source]

    sections = {side: getattr(config, side) for side in ("reference", "accel")}
    specs = {side: parse_spec(section.spec) for side, section in sections.items()}
    for spec in specs.values():
        _can_be_told(spec)
    named = [specs[side] for side in specs if side == "accel" or reference_named(config)]
    whole = config.run.checkpoint or next((p for spec in named if (p := default_checkpoint(spec)) is not None), None)
    if whole is None:
        raise UsageError("expected a checkpoint to cut, found none; use hf:PATH, or --set run.checkpoint=FOLDER")
    changed = {
        side: section.model_copy(
            update={"spec": f"hf:{part(Path(specs[side].target).expanduser())}{_query(section.spec)}"}
        )
        for side, section in sections.items()
        if specs[side].kind == "hf" and (Path(specs[side].target).expanduser() / "config.json").is_file()
    }
    done = {"checkpoint": part(whole), "layers": None, "random_weights": False, "manifest": None}
    if config.run.manifest is not None:
        say(f"the digests of {config.run.manifest} are of the whole model's files: they say nothing of a part")
    for spec in specs.values():
        if spec.kind == "openai":
            say(f"{spec.target} must serve {done['checkpoint']}, not the whole model")
    run = config.run.model_copy(update=done)
    return config.model_copy(update={**changed, "run": run})


def _query(spec: str) -> str:
    return f"?{spec.partition('?')[2]}" if "?" in spec else ""


def _can_be_told(spec: Spec) -> None:
    """Refuse a command that would serve the whole model."""
    if spec.kind == "serve" and "{checkpoint}" not in spec.target:
        raise UsageError(
            f"expected {{checkpoint}} in the command of serve:{spec.target}, found none: it would serve the whole model"
        )


def _made(config: Config, source: Path, say: Say, scratch: Path | None) -> Path:
    """Return the folder of the asked part of one checkpoint."""
    if config.run.random_weights:
        plan: Plan = plan_random(source, config.run.layers)
    else:
        assert config.run.layers is not None
        plan = plan_cut(open_checkpoint(source), config.run.layers, lists_of)
    folder = cache_folder("cuts") / plan.digest
    if folder.is_dir():
        say(f"{plan.cut.sentence}: taken from {folder}")
        return folder
    if scratch is not None:
        say(f"{plan.cut.sentence}: {size(plan.nbytes)} would be written to {folder}")
        folder = scratch / plan.digest
    else:
        say(f"{plan.cut.sentence}: {size(plan.nbytes)} are written to {folder}")
    written(plan, folder, say, hollow=scratch is not None)
    return folder


def written(plan: Plan, folder: Path, say: Say, *, hollow: bool = False) -> None:
    """Write a planned checkpoint, saying now and then how far it is."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_cut(plan, folder, telling(say), hollow=hollow)
    for note in plan.cut.notes:
        say(f"note: {note}")


def telling(say: Say) -> Told:
    """Return what turns bytes done into a line every few seconds: how far, how fast, how long still."""
    begin = last = time.monotonic()

    def told(done: int, total: int, name: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LOG_EVERY_S and done:
            last, rate = now, done / (now - begin)
            say(f"{size(done)} of {size(total)}, {size(rate)}/s, {(total - done) / rate:.0f} s left: {name}")

    return told


def cut_to(source: Path, layers: Sequence[int] | None, folder: Path, say: Say, *, random_weights: bool = False) -> Plan:
    """Write part of a checkpoint into a folder of one's own (`day0 cut`). Raises UsageError where one is there."""
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else (folder,)):
        raise UsageError(
            f"expected nothing at {folder}, found a {'folder' if folder.is_dir() else 'file'}; name another"
        )
    if random_weights:
        plan: Plan = plan_random(source, tuple(layers) if layers else None)
    else:
        plan = plan_cut(open_checkpoint(source), tuple(layers or ()), lists_of)
    if folder.is_dir():
        folder.rmdir()
    say(f"{plan.cut.sentence}: {size(plan.nbytes)}")
    written(plan, folder, say)
    return plan
