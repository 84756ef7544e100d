"""A side in its own process: hangs, crashes, nonsense and exceptions of a port become failures on disk."""

import sys
from pathlib import Path

import pytest
import torch

from harness.errors import SpecError
from harness.golden import load_failure, load_trace
from harness.record import Session, Watchdog
from harness.types import Case, Failure, Run, Setup

PORT = """
import os, signal, time
import torch
from harness.adapter import Inputs
from harness.types import Scope

class Port:
    name, scope = "toy", Scope()
    def __init__(self, fault):
        self.fault = fault
    def load(self, checkpoint, setup):
        if self.fault == "load":
            raise RuntimeError("no such kernel")
        return {"unused": []}
    def prepare(self, case, record):
        return Inputs(token_ids=record("inputs.token_ids", torch.tensor([case.token_ids]), kind="input"))
    def forward(self, inputs, record):
        h = record("embed", torch.nn.functional.one_hot(inputs.token_ids, 8).float())
        for i in range(3):
            h = record(f"layers.{i}", h * 1.5)
            if i == 1 and self.fault == "hang":
                time.sleep(600)
            if i == 1 and self.fault == "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            if i == 1 and self.fault == "raise":
                raise ValueError("bad shape in layer 1")
            if i == 1 and self.fault == "memory":
                raise torch.OutOfMemoryError("device is full")
            if i == 1 and self.fault == "print":
                print("not JSON")
        return h
    def generate(self, inputs, n, record):
        return [1] * n
    def close(self):
        pass

def factory(checkpoint, setup):
    if setup.options.get("fault") == "factory":
        raise RuntimeError("driver too old")
    return Port(setup.options.get("fault", ""))
"""
RUN = Run(id="text/free", stage="text", kind="forward", case=Case(id="a", token_ids=(1, 2, 3)))


@pytest.fixture
def session(tmp_path):
    (tmp_path / "port.py").write_text(PORT)
    made = []

    def make(fault=""):
        watchdog = Watchdog(run_s=3 if fault == "hang" else 120)
        spec = f"{tmp_path}/port.py:factory?fault={fault}"
        made.append(Session(tmp_path / "session", spec=spec, checkpoint=tmp_path, watchdog=watchdog))
        return made[-1], Setup(side="accel", role="accel", adapter=spec, options={"fault": fault})

    yield make
    for one in made:
        one.close()


def test_a_run_leaves_its_trace(session, tmp_path):
    """Taps in execution order, token axes and logits lie on disk; what the port prints does no harm."""
    one, setup = session("print")
    assert one.run(RUN, setup, tmp_path / "out") is None
    trace = load_trace(tmp_path / "out")
    assert list(trace.tensors) == ["inputs.token_ids", "embed", "layers.0", "layers.1", "layers.2", "logits"]
    assert trace.taps["layers.1"].dims == ("batch", "token", "feature")
    assert torch.equal(trace.tensors["layers.0"], trace.tensors["embed"] * 1.5)
    assert "not JSON" in (tmp_path / "session" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("fault", "kind", "word", "place"),
    [
        ("hang", "hang", "within 3 s", "layers.1"),
        ("segfault", "crash", "SIGSEGV", "layers.1"),
        ("raise", "raised", "bad shape in layer 1", "layers.1"),
        ("memory", "memory", "device is full", "layers.1"),
        ("load", "raised", "no such kernel", ""),
        ("factory", "raised", "driver too old", ""),
    ],
)
def test_a_port_that_fails_becomes_a_failure_with_its_place_and_stack(session, tmp_path, fault, kind, word, place):
    """The harness goes on; kind, message, last tap and stack are kept, in memory and on disk."""
    one, setup = session(fault)
    failure = one.run(RUN, setup, tmp_path / "out")
    assert isinstance(failure, Failure)
    assert failure.kind == kind
    assert word in failure.message
    assert place in failure.last_tap
    assert "port.py" in failure.stack
    assert load_failure(tmp_path / "out") == failure


def test_a_session_goes_on_after_a_crash(session, tmp_path):
    """After a crash the next request starts a fresh worker."""
    one, setup = session("segfault")
    assert one.run(RUN, setup, tmp_path / "out").kind == "crash"
    assert not one.alive
    described = one.describe(setup)
    assert described["name"] == "toy"
    assert described["capabilities"] == []


def test_an_adapter_that_cannot_be_imported_is_the_users_mistake(tmp_path):
    """A missing file and a broken import are usage errors (exit 4), with the traceback of the latter."""
    setup = Setup(side="accel", role="accel", adapter="x")
    (tmp_path / "broken.py").write_text("import a_module_that_is_not_there\n")
    for spec, word in ((f"{tmp_path}/none.py:factory", "none.py"), (f"{tmp_path}/broken.py:factory", "a_module_that")):
        one = Session(tmp_path / "session", spec=spec, checkpoint=tmp_path)
        with pytest.raises(SpecError, match=word):
            one.describe(setup)
        one.close()


def test_another_interpreter_may_run_the_port(session, tmp_path):
    """The worker runs under the interpreter that the user names."""
    one, setup = session()
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\ntouch "{tmp_path}/used"\nexec "{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)
    one.python = str(wrapper)
    assert one.describe(setup)["name"] == "toy"
    assert Path(tmp_path / "used").exists()
