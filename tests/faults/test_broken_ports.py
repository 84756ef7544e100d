"""Ports, references and goldens that break instead of answering: the right status, a report, nothing is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("fault", "words", "last", "message"),
    [
        ("factory_raises", (), "opening", "device 0 is not there"),
        ("load_raises", (), "loading weights", "expected 80 GB on the device"),
        ("hangs_in_load", ("--set", "watchdog.load_s=4"), "loading weights", "no sign of life|within 4 s"),
    ],
)
def test_a_port_that_cannot_be_loaded_is_an_error(verify, fault, words, last, message):
    """The load stage is ERROR with the port's own words and where it was; later stages are BLOCKED."""
    outcome = verify(fault, *words, stage="startup")
    first = outcome.refused_at("load", status="ERROR")
    assert first["tap"].startswith(last)
    assert any(word in first["message"] for word in message.split("|"))
    assert "Traceback" not in first["message"]


def test_a_crash_keeps_what_was_learned(verify):
    """A segfault in decode ends startup as ERROR with signal, stack and last tap; the load stage's result stands."""
    outcome = verify("segfaults_in_decode", stage="startup")
    first = outcome.refused_at("startup", status="ERROR")
    assert "SIGSEGV" in first["message"]
    assert outcome.stages["load"] == "PASSED"
    stage = next(s for s in outcome.results["stages"] if s["name"] == "startup")
    assert "attend_decode" in json.dumps(stage["facts"]["failures"]) or "builtin_ports" in json.dumps(stage["facts"])
    assert (outcome.out / "measurements" / "load.jsonl").is_file()


def test_a_nan_is_a_failure_where_it_arises(later):
    """A NaN is FAILED, never passed over: the first finding is the layer that made it."""
    outcome = later("nan_in_layer_2", stage="text")
    first = outcome.refused_at("text")
    assert first["tap"] == "layers.2"
    assert "not a finite number" in first["cause"]
    assert all("looking at the port changes it" not in f["cause"] for f in outcome.findings("text"))


@pytest.fixture(scope="module")
def unshown(later):
    """The text stage of a port that does not show a layer; it leaves goldens of the text stage behind."""
    return later("layer_not_shown", stage="text")


def test_a_tap_that_is_left_out_is_missing(unshown):
    """A layer that the port does not show is an ERROR: what was promised and not seen is not accepted."""
    first = unshown.refused_at("text", status="ERROR")
    assert first["tap"] == "layers.3"
    assert "does not show it" in first["cause"]


def test_a_damaged_golden_is_not_blamed_on_the_port(later, unshown, goldens, tmp_path):
    """A byte that changed in a recorded trace is found by its digest: ERROR, and the file to record again is named."""
    store = tmp_path / "goldens"
    shutil.copytree(goldens, store)
    for part in store.rglob("part-*.safetensors"):
        data = bytearray(part.read_bytes())
        data[-5] ^= 1
        part.write_bytes(data)
    outcome = later("nothing", store=store, stage="text")
    outcome.refused_at("text", status="ERROR")
    told = json.dumps(outcome.findings("text")) + next(s["reason"] for s in outcome.results["stages"])
    assert "the file is damaged; record this trace again" in told
    assert "the port: raised" not in told


REFERENCE = """
def opens(checkpoint, setup):
    raise RuntimeError("no such device")


def loads(checkpoint, setup):
    from reference_impl import adapter

    port = adapter(checkpoint, setup)
    port.load = lambda *given: (_ for _ in ()).throw(RuntimeError("no memory for the reference"))
    return port
"""


@pytest.mark.parametrize(("how", "message"), [("opens", "no such device"), ("loads", "no memory for the reference")])
def test_a_reference_that_fails_is_an_error_of_the_run(verify, tmp_path: Path, how, message):
    """Without a reference nothing that needs one is accepted: ERROR that names the reference, with a report."""
    file = tmp_path / "reference.py"
    file.write_text(REFERENCE)
    outcome = verify("builtin:accel", reference=f"{file}:{how}", stage="startup", store=tmp_path / "goldens")
    stage = next(n for n, status in outcome.stages.items() if status not in ("PASSED", "SKIPPED"))
    first = outcome.refused_at(stage, status="ERROR")
    assert "the reference" in json.dumps(first)
    assert message in json.dumps(outcome.findings(stage))
