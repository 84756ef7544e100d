"""The command line. Knows the user's words, exit codes and where messages go; must not know how anything is done.

Commands import what they need when they run, so that `--help` answers at once and imports no torch.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.errors import (
    EXIT_ACCEPTED,
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_REFUSED,
    EXIT_USAGE,
    Day0Error,
    TraceError,
    UsageError,
)

if TYPE_CHECKING:
    from harness.report.results import Results

app = typer.Typer(
    name="day0",
    help="Decide whether a port of a model to an accelerator is right, and where the first wrong thing is.",
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Exit codes: 0 accepted, 1 not accepted, 2 interrupted, 3 internal error, 4 usage, 5 nothing to verify.",
)

_CLICK_SIGNAL = 130  # what the command-line library makes of Ctrl-C

ConfigFlag = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Configuration; ./day0.toml is read if it is there.")
]
ReferenceFlag = Annotated[
    str | None, typer.Option("--reference", metavar="SPEC", help="The side that is believed (builtin:reference).")
]
AccelFlag = Annotated[str | None, typer.Option("--accel", metavar="SPEC", help="The port under test (builtin:accel).")]
SetFlag = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set any configuration key; repeatable."),
]
ChecklistsFlag = Annotated[
    Path | None,
    typer.Option("--checklists", metavar="DIR", help="Criteria to judge by, instead of the shipped ones."),
]
LayersFlag = Annotated[
    str | None,
    typer.Option("--layers", metavar="0-3,47,...", help="Run these layers alone, at true width: a cut checkpoint."),
]
RandomFlag = Annotated[
    bool,
    typer.Option("--random-weights", help="Make weights up, where there is only a configuration yet."),
]


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"day0 {version('day0')}")
        except PackageNotFoundError:
            typer.echo("day0 (not installed: running from a source tree)")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Decide whether a port of a model to an accelerator is right, and where the first wrong thing is."""


@app.command()
def verify(
    stage: Annotated[
        str | None,
        typer.Option("--stage", metavar="all|load,text,...", help="Stages; what comes before them runs too."),
    ] = None,
    config: ConfigFlag = None,
    reference: ReferenceFlag = None,
    accel: AccelFlag = None,
    goldens: Annotated[
        Path | None, typer.Option("--goldens", metavar="DIR", help="Recorded reference traces to use and to add to.")
    ] = None,
    checklists: ChecklistsFlag = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where the run is written (day0-run).")
    ] = None,
    profile: Annotated[
        str | None, typer.Option("--profile", metavar="quick|full", help="How much to exercise.")
    ] = None,
    require: Annotated[
        str | None, typer.Option("--require", metavar="image,...", help="Refuse the run if one of these is skipped.")
    ] = None,
    after: Annotated[
        Path | None,
        typer.Option("--after", metavar="RUN", help="Take earlier stages from a run with equal digests."),
    ] = None,
    layers: LayersFlag = None,
    random_weights: RandomFlag = False,
    manifest: Annotated[
        Path | None, typer.Option("--manifest", metavar="FILE", help="Published digests of the checkpoint's files.")
    ] = None,
    reread: Annotated[
        bool | None,
        typer.Option("--reread/--no-reread", help="Read files again that are unchanged since an earlier run."),
    ] = None,
    keep_going: Annotated[
        bool | None, typer.Option("--keep-going/--no-keep-going", help="Run later stages after one was refused.")
    ] = None,
    resume: Annotated[
        bool | None, typer.Option("--resume/--no-resume", help="Continue a run that was broken off.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run and what it costs, and stop.")
    ] = False,
    sets: SetFlag = None,
) -> None:
    """Take a port through the stages against its reference, and judge it."""
    flags = {
        "run.stage": stage, "reference.spec": reference, "accel.spec": accel, "run.goldens": goldens,
        "run.checklists": checklists, "run.out": out, "run.profile": profile, "run.require": require,
        "run.after": after, "run.keep_going": keep_going, "run.resume": resume, "run.layers": layers,
        "run.random_weights": random_weights or None, "run.manifest": manifest, "run.reread": reread,
    }  # fmt: skip
    from harness.config import load_config

    settings = load_config(config, flags=flags, sets=sets or ())
    from harness import pipeline

    if dry_run:
        _print_rows(pipeline.dry_run(settings, typer.echo))
        return
    from harness.report.github import append_step_summary
    from harness.report.terminal import make_display

    display = make_display(settings.run.stage, settings.run.out)
    results = None
    try:
        results = pipeline.verify(settings, display)
    finally:
        display.close(results)
    append_step_summary(results)
    raise typer.Exit(results.exit_code)


@app.command()
def record(
    reference: ReferenceFlag = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where the goldens are written.")] = None,
    config: ConfigFlag = None,
    stage: Annotated[
        str | None, typer.Option("--stage", metavar="all|load,text,...", help="Stages to record for.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option("--profile", metavar="quick|full", help="How much to exercise.")
    ] = None,
    layers: LayersFlag = None,
    random_weights: RandomFlag = False,
    sets: SetFlag = None,
) -> None:
    """Record goldens, on the machine that can run the reference."""
    from harness.config import load_config

    flags = {
        "reference.spec": reference, "run.stage": stage, "run.profile": profile, "run.layers": layers,
        "run.random_weights": random_weights or None,
    }  # fmt: skip
    settings = load_config(config, flags=flags, sets=sets or (), sides=("reference",))
    folder = out if out is not None else settings.run.goldens
    if folder is None:
        raise UsageError("expected a folder for the goldens, found none; add --out DIR")
    from harness import pipeline
    from harness.report.terminal import make_display

    display = make_display(settings.run.stage)
    try:
        count, lost = pipeline.record(settings, folder, display)
    finally:
        display.close(None)
    typer.echo(f"{count} runs recorded in {folder}")
    if count:
        same = f"--layers {layers} " if layers is not None else ""
        same += "--random-weights " if random_weights else ""
        typer.echo(f"use them with: day0 verify {same}--goldens {folder} --accel SPEC")
    if lost:
        _complain("\n".join(["not everything could be recorded; no port is judged by what is missing:", *lost]))
        raise typer.Exit(EXIT_REFUSED)


@app.command()
def compare(
    actual: Annotated[Path, typer.Argument(metavar="ACTUAL_DIR", help="Traces of the port.")],
    expected: Annotated[Path, typer.Argument(metavar="EXPECTED_DIR", help="Traces of the reference.")],
    checklists: ChecklistsFlag = None,
    mapping: Annotated[
        Path | None, typer.Option("--map", metavar="FILE", help="Mapping of the port's names to canonical ones.")
    ] = None,
    propose_map: Annotated[
        bool, typer.Option("--propose-map", help="Print such a mapping, found by content, and stop.")
    ] = False,
) -> None:
    """Judge two folders of traces; no model is needed."""
    for folder in (actual, expected):
        if not folder.is_dir():
            raise UsageError(f"expected a folder of traces at {folder}, found none")
    if propose_map and mapping is not None:
        raise UsageError("expected --map or --propose-map, found both")
    from harness import offline
    from harness.report.terminal import make_display

    with _bad_input():
        if propose_map:
            typer.echo(offline.propose_map(actual, expected), nl=False)
            return
        results = offline.compare_dirs(actual, expected, checklists, mapping=mapping)
    make_display(tuple(s.name for s in results.stages)).close(results)
    raise typer.Exit(results.exit_code)


@app.command()
def inspect(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder, or one safetensors file.")],
    tp: Annotated[int, typer.Option("--tp", help="Ranks that share each layer.")] = 1,
    ep: Annotated[int, typer.Option("--ep", help="Ranks that share the experts.")] = 1,
    pp: Annotated[int, typer.Option("--pp", help="Stages that share the layers.")] = 1,
    sp: Annotated[int, typer.Option("--sp", help="Ranks that share the sequence.")] = 1,
    context: Annotated[int, typer.Option("--context", metavar="N", min=1, help="Tokens of one request.")] = 32768,
    card_gib: Annotated[
        float | None, typer.Option("--card-gib", metavar="N", help="Memory of a card: does each rank fit?")
    ] = None,
    content: Annotated[bool, typer.Option("--content", help="Read every byte too: digests, codes, values.")] = False,
    manifest: Annotated[
        Path | None, typer.Option("--manifest", metavar="FILE", help="Published digests of the files.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="FILE", help="Keep finished shards here, and take them from it.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write it all as JSON.")] = None,
) -> None:
    """Say what a checkpoint is, what is wrong with it and what it takes: from its headers, or from all of it."""
    from harness.checkpoint.inspect import clean
    from harness.checkpoint.inspect import inspect as look
    from harness.checkpoint.layout import Layout
    from harness.errors import CheckpointError
    from harness.report.inspection import reading, show_inspection

    layout = Layout(tp=tp, ep=ep, pp=pp, sp=sp)
    read = reading(manifest=manifest, state=resume) if content or manifest or resume else None
    try:
        found = look(checkpoint, layout=layout, context=context, card_gib=card_gib, read=read)
    except CheckpointError as error:
        raise UsageError(str(error)) from None
    if json_file is not None:
        import json

        json_file.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    show_inspection(found)
    raise typer.Exit(EXIT_ACCEPTED if clean(found) else EXIT_REFUSED)


@app.command()
def cut(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder; it stays as it is.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to write.")],
    layers: LayersFlag = None,
    random_weights: RandomFlag = False,
) -> None:
    """Write some layers of a checkpoint as a checkpoint of their own, at true width: for an engine to serve."""
    from harness.config import parse_layers
    from harness.errors import CheckpointError
    from harness.portion import cut_to

    if layers is None and not random_weights:
        raise UsageError("expected --layers 0-3,47,... or --random-weights, found neither: nothing to cut")
    try:
        chosen = parse_layers(layers) if layers is not None else None
        cut_to(checkpoint, chosen, out, lambda text: typer.echo(text, err=True), random_weights=random_weights)
    except (ValueError, CheckpointError) as error:
        raise UsageError(f"--layers: {error}" if isinstance(error, ValueError) else str(error)) from None
    typer.echo(f"use it with: day0 verify --reference hf:{out} --accel SPEC")


@app.command()
def diagnose(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.")],
) -> None:
    """Print the findings of a run, the first wrong place first."""
    from harness.report.markdown import findings_text

    typer.echo(findings_text(_results(run_dir)))


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.")],
) -> None:
    """Render the reports of a run again, from its results.json alone."""
    from harness.report.render import render

    for path in render(_results(run_dir), run_dir):
        typer.echo(str(path))


@app.command()
def prove(
    everything: Annotated[bool, typer.Option("--all", help="Every injection on every architecture.")] = False,
    architecture: Annotated[
        str, typer.Option("--architecture", metavar="A,B", help="Small random models to prove on.")
    ] = "",
    only: Annotated[str, typer.Option("--only", metavar="ID,...", help="Injections by id or name.")] = "",
    seed: Annotated[int, typer.Option("--seed", help="Of the models' weights, and of the sample.")] = 0,
    jobs: Annotated[
        int, typer.Option("--jobs", metavar="N", help="Architectures at once (as there are processors, at most 4).")
    ] = 0,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write prove.md and prove.json.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the table as JSON.")] = None,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Damage checkpoints of every format instead of ports.")
    ] = False,
    formats: Annotated[str, typer.Option("--formats", metavar="A,B", help="Formats of --checkpoints.")] = "",
    beside: Annotated[bool, typer.Option("--beside", help="With --checkpoints: ask transformers too (slow).")] = False,
) -> None:
    """Break ports on purpose, and print what the gates say of each: the fault catalogue against the criteria."""
    from rich.console import Console

    from harness.faults import prove as proving
    from harness.faults.pending import PENDING
    from harness.faults.table import show

    proving.quiet()
    console = Console(width=None if sys.stdout.isatty() else 160)
    if checkpoints:
        from harness.faults.disk import prove as on_disk
        from harness.faults.disk import table

        found, code = on_disk.run(
            formats=formats, only=only, seed=seed, beside=beside, out=out, json_file=json_file,
            say=lambda text: typer.echo(text, err=True),
        )  # fmt: skip
        table.show(found, console)
        raise typer.Exit(code)
    rows, code = proving.run(
        everything=everything, architectures=architecture, only=only, seed=seed, jobs=jobs, out=out,
        json_file=json_file, say=lambda text: typer.echo(text, err=True),
    )  # fmt: skip
    show(rows, PENDING, console)
    raise typer.Exit(code)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to put the files.")] = Path("."),
) -> None:
    """Scaffold a port: a day0.toml and a port.py that run as they are."""
    from harness.scaffold import scaffold

    for path in scaffold(folder):
        typer.echo(f"wrote {path}")
    where = "" if folder == Path(".") else f" --config {folder / 'day0.toml'}"
    typer.echo(f"next: day0 verify --stage text{where}")


@app.command()
def doctor() -> None:
    """Describe this machine: versions, devices, memory, what day0 can do here."""
    from harness.doctor import describe

    for heading, rows in describe().items():
        typer.echo(heading)
        for name, value in rows:
            typer.echo(f"  {name:<24} {value}")


@contextmanager
def _bad_input() -> Iterator[None]:
    """Turn an unreadable trace or result that the user named into a usage error."""
    try:
        yield
    except TraceError as error:
        raise UsageError(str(error)) from None


def _results(run_dir: Path) -> Results:
    from harness.report.results import read_results

    if not run_dir.is_dir():
        raise UsageError(f"expected the folder of a run at {run_dir}, found none; `day0 verify` writes day0-run")
    with _bad_input():
        return read_results(run_dir)


def _print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print mappings as an aligned table; a key that a row lacks stays empty."""
    if not rows:
        typer.echo("nothing would run")
        return
    keys = list(dict.fromkeys(key for row in rows for key in row))
    table = [keys, *([str(row.get(key, "")) for key in keys] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(keys))]
    for line in table:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code; every message goes to stderr as one block."""
    try:
        code = app(args=list(argv) or ["--help"], prog_name="day0", standalone_mode=False)
    except Day0Error as error:
        _complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _complain("interrupted; what was recorded is kept, `--resume` goes on from there")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_REFUSED
    except Exception as error:
        return _unexpected(error)
    if code == _CLICK_SIGNAL:
        _complain("interrupted; what was recorded is kept, `--resume` goes on from there")
        return EXIT_INTERRUPTED
    return code if isinstance(code, int) else 0


def _unexpected(error: Exception) -> int:
    """Tell a mistake in the words (raised by the command-line library) from one in this program."""
    message = getattr(error, "format_message", None)
    if message is not None:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "day0"
        _complain(f"{message()}\ntry: {command} --help")
        return EXIT_USAGE
    if type(error).__name__ == "Abort":
        _complain("interrupted")
        return EXIT_INTERRUPTED
    traceback.print_exception(error)
    _complain("this is a mistake inside day0, not in the port; please report it with the lines above and `day0 doctor`")
    return EXIT_INTERNAL


def _complain(text: str) -> None:
    first, *rest = text.splitlines() or [""]
    print("\n".join([f"day0: {first}", *(f"      {line}" for line in rest)]), file=sys.stderr)


def main() -> int:
    """Enter from the `day0` command."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: small kernels spin more than they work
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
