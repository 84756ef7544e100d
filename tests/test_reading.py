"""The pass over a checkpoint's files in a process of its own: what it gives, keeps, and says when it ends badly."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from checkpoint.checkpoint_files import write

from harness import reading
from harness.checkpoint import open_checkpoint
from harness.checkpoint.scan import content_facts
from harness.reading import Reading, state_file
from harness.types import Failure


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    draw = torch.Generator().manual_seed(1)
    tensors = [{name: torch.randn(64, 64, generator=draw)} for name in ("a.weight", "b.weight")]
    return write(tmp_path_factory.mktemp("checkpoint"), *tensors)


def pretend(tmp_path, monkeypatch, script: str) -> None:
    """Let another program stand for the one that reads."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nread words\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def test_a_pass_gives_what_reading_here_gives_and_the_next_one_reuses_it(folder, tmp_path):
    """The facts are those of a pass in this process; an unchanged checkpoint is not read again unless that is asked."""
    state, notes = state_file(folder, tmp_path / "cache"), []
    here = content_facts(open_checkpoint(folder))
    for again, reused in ((False, 0), (False, 2), (True, 0)):
        under_way = Reading(folder, tmp_path / "out", state=state, again=again, noted=notes.append)
        facts = under_way.wait("load/content", 120)
        assert facts["digests"] == here["digests"]
        assert (facts["matrices"], facts["problems"]) == (2, [])
        assert len(facts["reused"]) == reused
        assert facts["read_bytes"] == (0 if reused else facts["bytes"])
    assert "in 2 files, about" in notes[0]
    assert "unchanged" in notes[1]


def test_a_checkpoint_that_is_none_is_told_in_its_own_words(tmp_path):
    """What cannot be opened becomes a failure that says what was expected."""
    found = Reading(tmp_path / "nothing", tmp_path / "out").wait("load/content", 120)
    assert isinstance(found, Failure)
    assert (found.kind, found.run) == ("raised", "load/content")
    assert "expected a checkpoint folder" in found.message


def test_a_pass_that_says_nothing_is_a_hang(tmp_path, monkeypatch):
    """Silence for longer than allowed ends it; how far it was stands in the message."""
    pretend(tmp_path, monkeypatch, f"echo '{json.dumps({'at': 'read 1 of 9 GiB'})}'; exec sleep 60")
    under_way = Reading(tmp_path, tmp_path / "out")
    found = under_way.wait("load/content", 1.0)
    assert isinstance(found, Failure)
    assert found.kind == "hang"
    assert "read 1 of 9 GiB" in found.message


@pytest.mark.parametrize(("script", "kind"), [("echo broken >&2; exit 3", "crash"), ("kill -9 $$", "memory")])
def test_a_pass_that_dies_is_told(script, kind, tmp_path, monkeypatch):
    """A crash keeps its last words; a process that was shot is one that took too much memory."""
    pretend(tmp_path, monkeypatch, script)
    found = Reading(tmp_path, tmp_path / "out").wait("load/content", 60)
    assert isinstance(found, Failure)
    assert found.kind == kind
    assert ("broken" in found.stack) == (kind == "crash")


def test_only_the_last_checkpoints_are_remembered(tmp_path, monkeypatch):
    """The oldest files of state go first."""
    monkeypatch.setattr(reading, "KEPT", 2)
    for number in range(4):
        (tmp_path / f"{number}.jsonl").touch()
    state_file(tmp_path, tmp_path)
    assert len(list(tmp_path.glob("*.jsonl"))) == 2
