"""What memory holds against what the checkpoint says: by name, in stored form, and by content."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_files import write

from harness.adapter import Weight
from harness.checkpoint import audit_weights, open_checkpoint
from harness.checkpoint.rows import RowTable, find_order, row_hashes
from harness.checkpoint.values import difference

DRAW = torch.Generator().manual_seed(7)


def randn(*shape):
    return torch.randn(*shape, generator=DRAW)


EXPERTS = {
    f"layers.0.mlp.experts.{e}.{p}_proj.weight": randn(*((6, 10) if p != "down" else (10, 6))).to(torch.bfloat16)
    for e in range(12)
    for p in ("gate", "up", "down")
}
OTHERS = {
    "embed.weight": randn(11, 10).to(torch.bfloat16),
    "layers.0.q_proj.weight": randn(8, 10).to(torch.bfloat16),
    "layers.0.k_proj.weight": randn(4, 10).to(torch.bfloat16),
    "layers.0.q_proj.bias": randn(8).to(torch.bfloat16),
    "layers.0.k_proj.bias": randn(4).to(torch.bfloat16),
    "layers.0.conv.weight": randn(6, 1, 4).to(torch.bfloat16),
    "layers.0.router.bias": 7 + 0.25 * randn(12),
    "norm.weight": (1 + 0.2 * randn(10)).to(torch.bfloat16),
}
STORED = {**OTHERS, **EXPERTS}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    halves = dict(list(STORED.items())[::2]), dict(list(STORED.items())[1::2])
    return open_checkpoint(write(tmp_path_factory.mktemp("audit"), *halves))


def audited(checkpoint, weights, *, tied=False, claims=None, dtype="bfloat16"):
    claims = claims or {}
    told = [Weight(name=n, tensor=t, checkpoint=claims.get(n, "")) for n, t in weights.items()]
    facts = audit_weights(checkpoint, told, tied=tied, dtype=dtype)
    json.dumps(facts, allow_nan=False)
    return facts, {w["name"]: w for w in facts["weights"]}


def gate(e):
    return EXPERTS[f"layers.0.mlp.experts.{e}.gate_proj.weight"]


def up(e):
    return EXPERTS[f"layers.0.mlp.experts.{e}.up_proj.weight"]


def down(e):
    return EXPERTS[f"layers.0.mlp.experts.{e}.down_proj.weight"]


def test_the_same_names_and_values(checkpoint):
    """A port that holds the checkpoint has every weight named, nothing unused, unfilled or different."""
    for held in (STORED, {n: t.float() for n, t in STORED.items()}, {"model." + n: t for n, t in STORED.items()}):
        facts, by_name = audited(checkpoint, held)
        assert [facts[k] for k in ("unused", "unfilled", "untied")] == [[], [], []]
        assert not facts["partial"]
        assert {w["match"] for w in by_name.values()} == {"named"}
        assert sum(w["mismatches"] + w["unmatched"] for w in by_name.values()) == 0


def test_one_wrong_element_is_found_with_its_place(checkpoint):
    """One element one ulp off is one mismatch, with index, values and distance."""
    wrong = STORED["layers.0.q_proj.weight"].clone()
    bits = wrong.view(torch.int16)
    bits[5, 3] += 1
    facts, by_name = audited(checkpoint, {**STORED, "layers.0.q_proj.weight": wrong})
    w = by_name["layers.0.q_proj.weight"]
    assert (w["mismatches"], w["unmatched"], w["worst"], w["max_ulp"]) == (1, 1, [5, 3], 1.0)
    assert facts["unused"] == []


def test_a_float32_exception_held_narrower_is_noted(checkpoint):
    """A router bias stored in float32 beside bfloat16 weights and held in bfloat16 is equal, and noted as narrowed."""
    held = {**STORED, "layers.0.router.bias": STORED["layers.0.router.bias"].to(torch.bfloat16)}
    _, by_name = audited(checkpoint, held)
    assert [n for n, w in by_name.items() if w["narrowed"]] == ["layers.0.router.bias"]
    assert by_name["layers.0.router.bias"]["mismatches"] == 0


FUSED = {
    "concatenated": lambda: torch.stack([torch.cat((gate(e), up(e))) for e in range(12)]),
    "transposed": lambda: torch.stack([torch.cat((gate(e), up(e))).t() for e in range(12)]),
    "interleaved": lambda: torch.stack([torch.stack((gate(e), up(e)), 1).flatten(0, 1) for e in range(12)]),
    "halves apart": lambda: torch.cat((torch.cat([gate(e) for e in range(12)]), torch.cat([up(e) for e in range(12)]))),
}


@pytest.mark.parametrize("how", FUSED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_experts_are_recognised(checkpoint, how, dtype):
    """Stacked, fused, transposed and interleaved experts are used up and in regular order, in either precision."""
    fused = FUSED[how]().to(dtype)
    facts, by_name = audited(checkpoint, {"w13": fused})
    w = by_name["w13"]
    assert (w["match"], w["unmatched"], w["regular"]) == ("content", 0, True)
    assert not [n for n in facts["unused"] if "gate" in n or "up_proj" in n]
    assert len([n for n in facts["unused"] if "down" in n]) == 12
    assert facts["partial"] == {}
    assert json.loads(w["order"])["transposed"] is (how == "transposed")


def test_orders_are_told_apart_and_do_not_depend_on_precision(checkpoint):
    """Every fusion has an order of its own; the same fusion has the same order in bfloat16 and float32."""
    orders = {}
    for how, make in FUSED.items():
        for dtype in (torch.bfloat16, torch.float32):
            _, by_name = audited(checkpoint, {"w13": make().to(dtype)})
            orders.setdefault(how, set()).add(by_name["w13"]["order"])
    assert all(len(found) == 1 for found in orders.values())
    assert len(set.union(*orders.values())) == len(FUSED)


def test_permuted_experts_are_not_ascending(checkpoint):
    """Experts 3 and 10 exchanged keep every value and lose their order; ten comes after nine, not after one."""
    right = torch.stack([down(e) for e in range(12)])
    wrong = right.clone()
    wrong[[3, 10]] = right[[10, 3]]
    _, by_name = audited(checkpoint, {"right": right, "wrong": wrong})
    assert by_name["right"]["regular"]
    assert not by_name["wrong"]["ascending"]
    assert by_name["wrong"]["unmatched"] == 0


def test_permuted_rows_of_a_named_weight(checkpoint):
    """Rows in another order are all mismatches by name, none by content, and their order is told."""
    q = STORED["layers.0.q_proj.weight"]
    permuted = q.reshape(2, 4, 10).transpose(0, 1).reshape(8, 10)
    facts, by_name = audited(checkpoint, {**STORED, "layers.0.q_proj.weight": permuted})
    w = by_name["layers.0.q_proj.weight"]
    assert w["mismatches"] > 50
    assert (w["unmatched"], w["regular"]) == (0, False)
    assert json.loads(w["order"])["streams"]
    assert facts["unused"] == []


def test_fused_biases_are_joined(checkpoint):
    """A fused bias is told as the stored vectors one after the other."""
    bias = torch.cat((STORED["layers.0.q_proj.bias"], STORED["layers.0.k_proj.bias"]))
    facts, by_name = audited(checkpoint, {"qk.bias": bias})
    w = by_name["qk.bias"]
    assert (w["match"], w["unmatched"]) == ("content", 0)
    assert [r[0] for r in json.loads(w["order"])["joined"]] == ["layers.0.q_proj.bias", "layers.0.k_proj.bias"]
    assert "layers.0.k_proj.bias" not in facts["unused"]


def test_another_layout_of_the_same_content(checkpoint):
    """A transposed linear and a convolution kernel without its axis of one are equal; a padded vocabulary is too."""
    held = {
        **STORED,
        "layers.0.q_proj.weight": STORED["layers.0.q_proj.weight"].t(),
        "layers.0.conv.weight": STORED["layers.0.conv.weight"].squeeze(1),
        "embed.weight": torch.cat((STORED["embed.weight"], torch.zeros(5, 10, dtype=torch.bfloat16))),
    }
    facts, by_name = audited(checkpoint, held)
    assert sum(w["mismatches"] for w in by_name.values()) == 0
    assert by_name["embed.weight"]["padding_rows"] == 5
    assert facts["unused"] == []


def test_rows_beyond_the_vocabulary_may_rest(tmp_path):
    """A head trimmed to the vocabulary that the configuration names is whole; one trimmed elsewhere lost rows."""
    head = randn(12, 10)
    checkpoint = open_checkpoint(write(tmp_path, {"unembed.weight": head}, config={"unpadded_vocab_size": 9}))
    facts, _ = audited(checkpoint, {"lm_head.weight": head[:9]})
    assert (facts["partial"], facts["unused"], list(facts["outside"])) == ({}, [], ["unembed.weight"])
    facts, _ = audited(checkpoint, {"lm_head.weight": head[:8]})
    assert facts["partial"] == {"unembed.weight": [8, 12]}
    facts, _ = audited(checkpoint, {"lm_head.weight": head[3:]})
    assert facts["partial"] == {"unembed.weight": [9, 12]}


def test_random_content_is_unfilled_and_its_source_unused(checkpoint):
    """A parameter whose content is in no shard is unfilled; the tensor that should have filled it is unused."""
    held = {n: t for n, t in STORED.items() if n != "layers.0.k_proj.weight"}
    facts, _ = audited(checkpoint, {**held, "layers.0.attention.key": randn(4, 10).to(torch.bfloat16)})
    assert facts["unfilled"] == ["layers.0.attention.key"]
    assert facts["unused"] == ["layers.0.k_proj.weight"]


def test_a_tied_head_is_the_embedding(checkpoint):
    """A head equal to the embedding is filled by it, a random one of its shape is named as untied."""
    facts, _ = audited(checkpoint, {**STORED, "lm_head.weight": STORED["embed.weight"].clone()}, tied=True)
    assert (facts["unfilled"], facts["untied"]) == ([], [])
    facts, _ = audited(checkpoint, {**STORED, "lm_head.weight": randn(11, 10).to(torch.bfloat16)}, tied=True)
    assert (facts["unfilled"], facts["untied"]) == (["lm_head.weight"], ["lm_head.weight"])


def test_a_claim_is_held_against_the_tensor_it_names(checkpoint):
    """A port's own name with a wrong claim is judged by the claim."""
    held = {"mine": STORED["layers.0.q_proj.weight"]}
    _, by_name = audited(checkpoint, held, claims={"mine": "layers.0.q_proj.weight"})
    assert by_name["mine"]["mismatches"] == 0
    _, by_name = audited(checkpoint, held, claims={"mine": "layers.0.k_proj.weight"})
    assert by_name["mine"]["mismatches"] == 80


def test_layers_beyond_the_model_and_computed_buffers_may_rest(tmp_path):
    """What lies beyond the configured layers, and computed buffers, is listed outside and not unused."""
    tensors = {"layers.0.w": randn(3, 5), "layers.1.w": randn(3, 5), "layers.0.rotary.inv_freq": randn(4)}
    checkpoint = open_checkpoint(write(tmp_path, tensors, config={"num_hidden_layers": 1}))
    facts, _ = audited(checkpoint, {"layers.0.w": tensors["layers.0.w"], "rotary.inv_freq": randn(4)})
    assert facts["unused"] == []
    assert set(facts["outside"]) == {"layers.1.w", "layers.0.rotary.inv_freq"}
    assert facts["unfilled"] == []


def test_stored_form_in_memory_is_compared_byte_by_byte(tmp_path):
    """A port that keeps codes and scales as stored uses the weight up; one changed code is one mismatch."""
    codes = randn(5, 7).to(torch.float8_e4m3fn)
    tensors = {"q.weight": codes, "q.weight_scale_inv": torch.rand(3, 2, generator=DRAW)}
    config = {"quantization_config": {"weight_block_size": [2, 4]}}
    checkpoint = open_checkpoint(write(tmp_path, tensors, config=config))
    facts, by_name = audited(checkpoint, tensors)
    assert facts["unused"] == []
    assert {w["match"] for w in by_name.values()} == {"raw"}
    wrong = codes.view(torch.uint8).clone()
    wrong[2, 3] ^= 1
    _, by_name = audited(checkpoint, {**tensors, "q.weight": wrong.view(torch.float8_e4m3fn)})
    assert by_name["q.weight"]["mismatches"] == 1
    facts, _ = audited(checkpoint, {"q.weight": codes})
    assert facts["unused"] == ["q.weight"]


def test_zero_rows_do_not_confuse_an_order(tmp_path):
    """Rows of zeros, the same in every tensor, go on with the run that they stand in."""
    parts = {f"e.{i}.w": randn(6, 8) for i in range(4)}
    for value in parts.values():
        value[[0, 3]] = 0
    checkpoint = open_checkpoint(write(tmp_path, parts))
    facts, by_name = audited(checkpoint, {"all": torch.stack(list(parts.values()))})
    assert by_name["all"]["regular"]
    assert by_name["all"]["ambiguous_rows"] == 8
    assert facts["unused"] == []


def test_row_hashes_see_every_bit_and_no_sign_of_zero():
    """Flipping any one bit, or the same bit twice, changes a row's hash; -0.0 does not."""
    row = randn(64).to(torch.bfloat16)
    rows = row.repeat(16 * 64 + 1, 1)
    bits = rows.view(torch.int16)
    for column in range(64):
        for bit in range(16):
            bits[1 + 16 * column + bit, column] ^= torch.tensor(1 << bit if bit < 15 else -(1 << 15), dtype=torch.int16)
    assert len(set(row_hashes(rows).tolist())) == 16 * 64 + 1
    pairs = row.repeat(64, 1)
    for column in range(1, 64):
        pairs[column, [0, column]] *= -1
    assert len(set(row_hashes(pairs).tolist())) == 64
    zeros = torch.tensor([[0.0, 1.0, 2.0], [-0.0, 1.0, 2.0]])
    assert len(set(row_hashes(zeros).tolist())) == 1


def test_an_order_that_is_no_pattern_is_given_up():
    """A random permutation of many rows has no run description, and still a stable digest in the audit."""
    rows = row_hashes(randn(9000, 3))
    table = RowTable.build([("x", rows)])
    assert find_order(rows, table) is not None
    shuffled = rows[torch.randperm(9000, generator=DRAW).numpy()]
    assert find_order(shuffled, table) is None


def test_nan_is_never_equal():
    """NaN held where NaN is expected is a mismatch, and its distance is infinite."""
    value = torch.tensor([[1.0, float("nan"), 3.0]])
    found = difference(actual=value, expected=value)
    assert (found.mismatches, found.worst, found.max_ulp) == (1, (0, 1), float("inf"))
