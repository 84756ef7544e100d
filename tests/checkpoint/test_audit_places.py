"""Where a finding lies: tensor, file, byte and coordinate of the first wrong element, for every format and merge."""

from __future__ import annotations

import shutil

import pytest
import torch
from checkpoint_files import write
from quantised_weights import weights

from harness.adapter import Weight
from harness.checkpoint import audit_weights, decode, logical_tensors, open_checkpoint
from harness.checkpoint.formats import decode_parts
from harness.checkpoint.place import place_of

DRAW = torch.Generator().manual_seed(11)
EXPERTS, OUT, IN = 6, 8, 10


def randn(*shape):
    return torch.randn(*shape, generator=DRAW).bfloat16()


@pytest.mark.parametrize("format", list(weights()))
def test_the_byte_named_is_the_elements_own(tmp_path, format):
    """Changing the byte that is named for an element changes that element, and only those that share the byte."""
    tensors, config = weights()[format]
    folder = write(tmp_path / "right", tensors, config=config)
    checkpoint = open_checkpoint(folder)
    (logical,) = logical_tensors(checkpoint)
    right = decode(checkpoint, logical).flatten()
    for flat in (0, 1, right.numel() // 2 + 3, right.numel() - 1):
        file, offset = place_of(checkpoint, logical, flat)
        other = shutil.copytree(folder, tmp_path / f"wrong{flat}")
        content = bytearray((other / file).read_bytes())
        content[offset] ^= 0x11  # one bit of either nibble
        (other / file).write_bytes(content)
        changed = open_checkpoint(other)
        wrong = (decode(changed, logical_tensors(changed)[0]).flatten() != right).nonzero()[:, 0].tolist()
        assert flat in wrong
        assert len(wrong) <= 2


@pytest.mark.parametrize("format", list(weights()))
def test_a_weight_that_differs_names_file_and_byte(tmp_path, format):
    """The first wrong element of a weight held under its name is told with its place in memory and on disk."""
    tensors, config = weights()[format]
    checkpoint = open_checkpoint(write(tmp_path / "c", tensors, config=config))
    (logical,) = logical_tensors(checkpoint)
    held = decode(checkpoint, logical)
    flat = held.numel() // 3
    held.view(-1)[flat:] += 1000.0
    facts = audit_weights(checkpoint, [Weight(name=logical.name, tensor=held)], tied=False, dtype="float32")
    (fact,) = facts["weights"]
    assert (fact["file"], fact["offset"]) == place_of(checkpoint, logical, flat)
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), held.shape)]
    assert fact["first"] == index
    assert fact["first_row"] == flat // held.shape[-1]


STORED = {
    f"model.layers.1.mlp.experts.{e}.{p}_proj.weight": randn(OUT, IN) for e in range(EXPERTS) for p in ("gate", "up")
}


def gate(e):
    return STORED[f"model.layers.1.mlp.experts.{e}.gate_proj.weight"]


def up(e):
    return STORED[f"model.layers.1.mlp.experts.{e}.up_proj.weight"]


MERGED = {
    "concatenated": lambda: torch.stack([torch.cat((gate(e), up(e))) for e in range(EXPERTS)]),
    "transposed": lambda: torch.stack([torch.cat((gate(e), up(e))).t() for e in range(EXPERTS)]),
    "interleaved": lambda: torch.stack([torch.stack((gate(e), up(e)), 1).flatten(0, 1) for e in range(EXPERTS)]),
    "interleaved and transposed": lambda: torch.stack(
        [torch.stack((gate(e), up(e)), 1).flatten(0, 1).t() for e in range(EXPERTS)]
    ),
    "halves apart": lambda: torch.cat([gate(e) for e in range(EXPERTS)] + [up(e) for e in range(EXPERTS)]),
}
WHERE = {
    "concatenated": (4, OUT + 3, 7),
    "transposed": (4, 7, OUT + 3),
    "interleaved": (4, 2 * 3 + 1, 7),
    "interleaved and transposed": (4, 7, 2 * 3 + 1),
    "halves apart": ((EXPERTS + 4) * OUT + 3, 7),
}


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return open_checkpoint(write(tmp_path_factory.mktemp("merged"), STORED))


def audited(checkpoint, name, held):
    facts = audit_weights(checkpoint, [Weight(name=name, tensor=held)], tied=False, dtype="bfloat16")
    assert facts["unused"] == []
    return facts["weights"][0]


@pytest.mark.parametrize("how", MERGED)
def test_a_wrong_element_of_a_merged_weight_names_its_own_tensor(experts, how):
    """One element of expert 4's up projection, inside of all experts' gate and up, is told with its row and byte."""
    held = MERGED[how]().clone()
    held[WHERE[how]] += 1
    fact = audited(experts, "w13", held)
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    ref = experts.tensors[name]
    assert (fact["source"], fact["first_row"], fact["first"]) == (name, 3, list(WHERE[how]))
    assert (fact["file"], fact["offset"]) == (ref.file, ref.begin + 2 * (3 * IN + 7))
    assert fact["unmatched"] == 1


@pytest.mark.parametrize("how", MERGED)
@pytest.mark.parametrize(("damage", "words"), [
    (lambda t: t * 2, "2 times the checkpoint's values"),
    (lambda t: t.to(torch.float8_e4m3fn).bfloat16(), "e4m3 without a scale"),
    (lambda t: t, ""),
], ids=["doubled", "rounded", "right"])  # fmt: skip
def test_a_merged_weight_of_which_all_is_wrong_is_taken_apart_by_names(experts, how, damage, words):
    """Every expert decoded with one mistake: no row is the checkpoint's, and still each tensor's cause is told."""
    fact = audited(experts, "model.layers.1.mlp.experts.gate_up_proj", damage(MERGED[how]()))
    assert fact["match"] == "content"
    assert words in fact["pattern"]
    assert bool(fact["unmatched"]) is bool(words)


def test_all_rows_of_one_projection_are_wrong(experts):
    """The up projections of all experts are wrong and none has a right row: what is left over is theirs."""
    held = MERGED["concatenated"]().clone()
    held[:, OUT:] *= 0.5
    fact = audited(experts, "w13", held)
    assert fact["source"].startswith("model.layers.1.mlp.experts.0.up_proj.weight, ")
    assert "0.5 times" in fact["pattern"]
    assert fact["first"] == [0, OUT, 0]


@pytest.mark.parametrize(("damage", "words"), [
    (lambda t: torch.cat((t[:, 8:], t[:, :8]), 1), "gate and up"),
    (lambda t: t.unflatten(1, (2, 8)).transpose(1, 2).flatten(1, 2), "gate and up"),
    (lambda t: t * 4, "4 times"),
    (lambda t: t, ""),
], ids=["exchanged", "woven", "scaled", "right"])  # fmt: skip
def test_a_square_may_be_held_with_axes_exchanged(tmp_path, damage, words):
    """A stack of squares held [E, in, out] says no more by its shape: the mistake below is told, or nothing."""
    stored = randn(3, 16, 16)
    checkpoint = open_checkpoint(write(tmp_path, {"experts.w13": stored}))
    held = Weight(name="experts.w13", tensor=damage(stored).transpose(1, 2).contiguous())
    (fact,) = audit_weights(checkpoint, [held], tied=False, dtype="bfloat16")["weights"]
    assert bool(fact["mismatches"]) is bool(words)
    assert words in fact["pattern"]


def test_scales_of_a_neighbour_are_named(tmp_path):
    """A weight decoded with the scales of another expert, or of another projection, names the tensor they are of."""
    tensors, config = {}, {}
    for number, name in enumerate(("experts.0.up", "experts.1.up", "experts.0.gate")):
        stored, config = weights(seed=number)["mxfp4"]
        tensors |= {f"layers.0.{name}.{key.split('.', 1)[1]}": value for key, value in stored.items()}
    checkpoint = open_checkpoint(write(tmp_path, tensors, config=config))
    logicals = {x.name: x for x in logical_tensors(checkpoint)}
    own = logicals["layers.0.experts.0.up.weight"]
    for other in ("layers.0.experts.1.up.weight", "layers.0.experts.0.gate.weight"):
        parts = {
            "weight": checkpoint.read(own.parts["weight"]),
            "scale": checkpoint.read(logicals[other].parts["scale"]),
        }
        held = Weight(name=own.name, tensor=decode_parts(own, parts))
        facts = audit_weights(checkpoint, [held], tied=False, dtype="float32")
        assert f"the scales of {other} (another tensor's)" in facts["weights"][0]["pattern"]
