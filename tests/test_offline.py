"""Two folders of traces against each other: every kind of bad input has a status and a message, and none passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness import cli
from harness.errors import MappingError, TraceError
from harness.golden import save_trace
from harness.offline import compare_dirs, propose_map
from harness.types import Case, Run, Setup, Status, Tap, Trace

TOKENS, WIDTH, VOCAB = 61, 64, 96
DIMS = ("batch", "token", "feature")


def request(tokens: int = TOKENS) -> Run:
    case = Case(id="x", token_ids=tuple(range(tokens)))
    return Run(id="text/free", stage="text", kind="forward", case=case)


def values(seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"embed": WIDTH, "layers.0": WIDTH, "layers.1": WIDTH, "logits": VOCAB}
    made = {name: torch.randn(1, TOKENS, width, generator=draw) for name, width in shapes.items()}
    choice = torch.rand(TOKENS, 8, generator=draw).topk(2, dim=-1).indices
    return {"inputs.token_ids": torch.arange(TOKENS)[None], **made, "layers.1.moe.router.topk": choice}


def trace(role: str, tensors: dict[str, torch.Tensor], run: Run) -> Trace:
    dtype = "float32" if role == "oracle" else "bfloat16"
    kinds = {"logits": "logits", "inputs.token_ids": "input", "layers.1.moe.router.topk": "routing"}
    taps = {
        n: Tap(name=n, kind=kinds.get(n, "hidden"), dims=DIMS[3 - t.dim() :] if t.dim() <= 3 else ())
        for n, t in tensors.items()
    }
    side = "accel" if role == "accel" else "reference"
    setup = Setup(side=side, role=role, adapter="x", dtype=dtype)
    return Trace(setup=setup, run=run, taps=taps, tensors=tensors, facts={})


def rounded(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Return values as an honest bfloat16 run has them."""
    draw = torch.Generator().manual_seed(seed)
    return {
        n: (t + 0.004 * torch.randn(t.shape, generator=draw)).to(torch.bfloat16) if t.is_floating_point() else t
        for n, t in tensors.items()
    }


@pytest.fixture
def folders(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Write an honest pair, changed by the caller: `folders(port=..., oracle=..., run=...)`."""

    def write(port=lambda t: t, oracle=lambda t: t, run=lambda r: r, setup=lambda s: s) -> tuple[Path, Path]:
        exact = values()
        save_trace(tmp_path / "gold" / "oracle" / "a", trace("oracle", oracle(dict(exact)), request()))
        save_trace(tmp_path / "gold" / "floor" / "a", trace("floor", oracle(rounded(exact, 1)), request()))
        ours = trace("accel", port(rounded(exact, 2)), run(request()))
        save_trace(tmp_path / "mine" / "free", replace(ours, setup=setup(ours.setup)))
        return tmp_path / "mine", tmp_path / "gold"

    return write


def judged(actual: Path, expected: Path) -> tuple[str, dict[str, str], str]:
    """Return the stage's status, the statuses of its blocking criteria that do not pass, and all that was said."""
    results = compare_dirs(actual, expected)
    assert results.exit_code == (0 if results.stages[0].status == "PASSED" else 1)
    stage = results.stages[0]
    bad = {v.criterion.id: v for v in stage.verdicts if v.criterion.blocking and v.status != "PASSED"}
    said = " | ".join([*(v.reason for v in bad.values()), *results.scope.not_covered])
    return Status(stage.status).value, {k: Status(v.status).value for k, v in bad.items()}, said


def without(name: str) -> Callable[[dict], dict]:
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


def changed(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict], dict]:
    return lambda tensors: {n: how(t) if n == name else t for n, t in tensors.items()}


def holed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.reshape(-1)[7] = float("nan")
    return tensor


SILENT = changed("layers.1", torch.zeros_like)


def test_an_honest_pair_is_accepted(folders):
    """The twin of all that follows: another rounding of the same values passes."""
    assert judged(*folders())[:2] == ("PASSED", {})


@pytest.mark.parametrize(
    ("port", "oracle", "status", "said"),
    [
        (without("layers.1"), None, "ERROR", "missing: the port did not record it (layers.1)"),
        (without("logits"), None, "ERROR", "missing: the port did not record it (logits)"),
        (without("layers.1.moe.router.topk"), None, "ERROR", "missing: the port did not record it"),
        (changed("layers.0", lambda t: t[..., :32]), None, "ERROR", "expected the shape (1, 61, 64) of the reference"),
        (changed("layers.0", lambda t: t[:, :60]), None, "ERROR", "found (1, 60, 64)"),
        (changed("layers.0", lambda t: t.long()), None, "ERROR", "not the same kind of tensor"),
        (changed("layers.1", holed), None, "FAILED", "not finite at layers.1"),
        (None, changed("layers.1", holed), "ERROR", "the oracle's value is not finite"),
        (changed("layers.1", holed), changed("layers.1", holed), "ERROR", "the oracle's value is not finite"),
        (None, SILENT, "INCONCLUSIVE", "the expected value is zero everywhere"),
        (SILENT, SILENT, "INCONCLUSIVE", "zero everywhere"),
        (SILENT, None, "FAILED", ""),
        (changed("inputs.token_ids", lambda t: t + 1), None, "FAILED", ""),
        (lambda t: {}, None, "ERROR", "empty: the port's trace text/free holds no tensor"),
        (None, lambda t: {}, "ERROR", "empty: the expected trace text/free holds no tensor"),
    ],
)  # fmt: skip
def test_bad_input_has_a_status_and_a_reason(folders, port, oracle, status, said):
    """Missing taps, other shapes, kinds or token counts, NaN, no signal, nothing at all: named, and not accepted."""
    found, bad, words = judged(*folders(port=port or (lambda t: t), oracle=oracle or (lambda t: t)))
    assert found == status, (bad, words)
    assert bad
    assert said in words


def test_taps_that_only_the_port_has_are_said(folders):
    """What has no counterpart is listed as not covered; it neither passes nor fails."""
    found, _, words = judged(*folders(port=lambda t: {**t, "extra.tap": torch.ones(3)}))
    assert found == "PASSED"
    assert "1 taps" in words
    assert "extra.tap" in words


def test_another_request_is_refused(folders):
    """Traces of other token ids are never compared; the message says which lengths are there."""
    mine, gold = folders(run=lambda r: request(60))
    with pytest.raises(TraceError, match=r"answers the same input \(60 tokens.*requests of 61 tokens"):
        compare_dirs(mine, gold)


def test_another_checkpoint_or_recorder_is_refused(folders, tmp_path):
    """Traces of two checkpoints, or of another version of the recorder, are not compared."""
    mine, gold = folders()
    said = {"checkpoint": "a" * 32}
    save_trace(gold / "oracle" / "a", replace(trace("oracle", values(), request()), provenance=said))
    save_trace(mine / "free", replace(trace("accel", values(), request()), provenance={"checkpoint": "b" * 32}))
    with pytest.raises(TraceError, match="expected traces of one checkpoint, found bbbbbbbbbbbb and aaaaaaaaaaaa"):
        compare_dirs(mine, gold)
    save_trace(mine / "free", replace(trace("accel", values(), request()), provenance={"recorder": "0"}))
    with pytest.raises(TraceError, match="stale: made by version 0 of the recorder"):
        compare_dirs(mine, gold)


def test_a_folder_without_traces_is_refused(tmp_path, folders):
    """An empty folder is no evidence, on either side."""
    mine, gold = folders()
    (tmp_path / "none").mkdir()
    for pair in ((tmp_path / "none", gold), (mine, tmp_path / "none")):
        with pytest.raises(TraceError, match=r"found no manifest\.json"):
            compare_dirs(*pair)


def test_a_floor_of_another_precision_is_said(folders):
    """A float32 port held to a bfloat16 floor is not judged as sharply as it could be, and that is written."""
    words = judged(*folders(setup=lambda s: replace(s, dtype="float32")))[2]
    assert "the floor was recorded in bfloat16" in words


ROW = '[[taps]]\ntap = "{tap}"\nfrom = "{source}"\nexpr = "{expr}"\n'
NAMES = {"embed": "wte", "layers.0": "h.0", "layers.1": "h.1", "logits": "head", "layers.1.moe.router.topk": "h.1.topk"}


def renamed(tensors: dict) -> dict:
    return {NAMES.get(n, n): t for n, t in tensors.items()}


def mapping(folder: Path, *rows: tuple[str, str, str]) -> Path:
    text = "".join(ROW.format(tap=t, source=s, expr=e) for t, s, e in rows)
    (folder / "map.toml").write_text('format = "day0.map/1"\n' + text)
    return folder / "map.toml"


def test_a_mapping_brings_names_together(tmp_path, folders, capsys):
    """Under the port's own names nothing is found; with the mapping the same traces are accepted."""
    mine, gold = folders(port=renamed)
    assert judged(mine, gold)[0] == "ERROR"
    rows = [(tap, name, "out") for tap, name in NAMES.items()]
    assert cli.run(["compare", str(mine), str(gold), "--map", str(mapping(tmp_path, *rows))]) == 0
    assert "accepted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (("layers.{n}", "transformer.{n}", "out"), "matches nothing"),
        (("layers.{n}", "h.{n}", "out.sum()"), "is not in the mapping language"),
        (("layers.{n}", "h.{n}", "reshape(out, 7, 7)"), "the shapes do not fit"),
    ],
)
def test_a_bad_mapping_is_a_usage_error(tmp_path, folders, row, said, capsys):
    """A mapping that matches nothing, speaks another language or does not fit ends with exit code 4 and the reason."""
    mine, gold = folders(port=renamed)
    path = mapping(tmp_path, row)
    with pytest.raises(MappingError, match=said):
        compare_dirs(mine, gold, mapping=path)
    assert cli.run(["compare", str(mine), str(gold), "--map", str(path)]) == 4
    assert said in capsys.readouterr().err


def test_a_mapping_is_proposed_and_then_accepted(tmp_path, folders, capsys):
    """What --propose-map prints is a mapping with which the traces are accepted."""
    mine, gold = folders(port=renamed)
    assert cli.run(["compare", str(mine), str(gold), "--propose-map"]) == 0
    path = tmp_path / "found.toml"
    path.write_text(capsys.readouterr().out)
    assert compare_dirs(mine, gold, mapping=path).exit_code == 0
    assert cli.run(["compare", str(mine), str(gold), "--propose-map", "--map", str(path)]) == 4


def test_nothing_alike_proposes_nothing(folders):
    """Where no tensor is like an expected one, there is no file to print."""
    noise = {f"h.{i}": torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(90 + i)) for i in range(9)}
    mine, gold = folders(port=lambda t: {n: noise[f"h.{i}"] for i, n in enumerate(noise)})
    with pytest.raises(TraceError, match="nothing can be proposed"):
        propose_map(mine, gold)
