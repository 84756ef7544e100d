"""The writers of each format: what they store is what they say, and a right checkpoint has nothing to be told of it."""

from __future__ import annotations

import pytest
import torch

from harness.checkpoint import decode, logical_tensors, open_checkpoint
from harness.checkpoint.problems import checkpoint_problems
from harness.checkpoint.scan import content_facts
from harness.faults.disk.writers import FORMATS, write


@pytest.mark.parametrize("name", FORMATS)
def test_a_right_checkpoint_is_decoded_and_silent(name, tmp_path):
    """Each weight decodes bit for bit to what the writer says its values are; no check says anything."""
    files = write(name)
    checkpoint = open_checkpoint(files.write(tmp_path / "ck"))
    found = {x.name: x for x in logical_tensors(checkpoint)}
    assert set(found) == set(files.weights)
    for weight in files.weights.values():
        value = decode(checkpoint, found[weight.name]).float()
        assert torch.equal(value, torch.from_numpy(weight.truth)), weight.name
    assert checkpoint_problems(checkpoint) == []
    facts = content_facts(checkpoint)
    assert (facts["problems"], facts["suspicions"]) == ([], [])
