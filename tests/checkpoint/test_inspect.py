"""What an inspection says of a checkpoint, as JSON and by its exit code."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_files import write

from harness.checkpoint.inspect import clean, inspect
from harness.checkpoint.layout import Layout, runs
from harness.cli import run
from harness.errors import CheckpointError, UsageError

HIDDEN, HEADS, KV, DIM, WIDTH, VOCAB, LAYERS, EXPERTS = 32, 4, 2, 8, 96, 40, 4, 6
CONFIG = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV,
    "head_dim": DIM, "intermediate_size": WIDTH, "vocab_size": VOCAB, "num_experts": EXPERTS,
    "moe_intermediate_size": WIDTH, "tie_word_embeddings": False,
}  # fmt: skip


def tensors(*, experts: bool = False, packed: bool = False) -> dict[str, torch.Tensor]:
    """Return a small decoder; its experts may be packed in four bits with a scale byte for each 32."""
    found = {"model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, rows, columns in (
            ("q_proj", HEADS * DIM, HIDDEN), ("k_proj", KV * DIM, HIDDEN), ("v_proj", KV * DIM, HIDDEN),
            ("o_proj", HIDDEN, HEADS * DIM),
        ):  # fmt: skip
            found[f"{at}.self_attn.{name}.weight"] = torch.zeros(rows, columns, dtype=torch.bfloat16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}.{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        owners = [f"{at}.mlp.experts.{e}" for e in range(EXPERTS)] if experts else [f"{at}.mlp"]
        for owner in owners:
            for name, rows, columns in (
                ("gate_proj", WIDTH, HIDDEN),
                ("up_proj", WIDTH, HIDDEN),
                ("down_proj", HIDDEN, WIDTH),
            ):
                if packed:
                    found[f"{owner}.{name}.weight_packed"] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
                    found[f"{owner}.{name}.weight_scale"] = torch.full((rows, columns // 32), 127, dtype=torch.uint8)
                else:
                    found[f"{owner}.{name}.weight"] = torch.zeros(rows, columns, dtype=torch.bfloat16)
        if experts:
            found[f"{at}.mlp.gate.weight"] = torch.zeros(EXPERTS, HIDDEN, dtype=torch.bfloat16)
    found["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    found["lm_head.weight"] = torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16)
    return found


PACKED = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ["lm_head"]}


def test_a_whole_checkpoint_is_clean(tmp_path):
    """A checkpoint that is whole has no problem, and its parts and formats add up to what is stored."""
    config = {**CONFIG, "quantization_config": PACKED}
    found = inspect(write(tmp_path, tensors(experts=True, packed=True), config=config))
    assert found["problems"] == []
    assert sum(row["bytes"] for row in found["parts"].values()) == found["bytes"]
    assert sum(row["tensors"] for row in found["parts"].values()) == found["tensors"]
    assert set(found["parts"]) == {"attention", "experts", "embeddings", "head", "norms", "router"}
    assert found["parts"]["experts"]["parameters"] == LAYERS * EXPERTS * 3 * WIDTH * HIDDEN
    assert found["formats"]["mxfp4"]["weights"] == LAYERS * EXPERTS * 3
    assert found["plan"]["cache"]["bytes_per_token"] == LAYERS * 2 * KV * DIM * 2
    json.dumps(found, allow_nan=False)


def test_ranks_hold_everything_once(tmp_path):
    """With pipeline stages and experts apart nothing is lost or held twice, but what every rank holds whole."""
    folder = write(tmp_path, tensors(experts=True), config=CONFIG)
    whole = inspect(folder)["bytes"]
    staged = inspect(folder, layout=Layout(pp=3))["plan"]["ranks"]
    assert [r["layers"] for r in staged] == [[0, 2], [2, 3], [3, 4]]
    assert sum(r["weight_bytes"] for r in staged) == whole
    apart = inspect(folder, layout=Layout(ep=4))
    experts = apart["parts"]["experts"]["bytes"]
    assert sum(r["weight_bytes"] for r in apart["plan"]["ranks"]) == 4 * (whole - experts) + experts
    assert [p["kind"] for p in apart["problems"]] == ["uneven_experts"]
    assert clean(apart)


def test_a_cut_through_a_block_or_a_head_is_named(tmp_path):
    """96 columns in blocks of 32 over two ranks are a block and a half each; four heads over three ranks are cut."""
    config = {**CONFIG, "quantization_config": PACKED}
    folder = write(tmp_path, tensors(packed=True), config=config)
    found = inspect(folder, layout=Layout(tp=2))["problems"]
    assert {(p["kind"], p["tensor"]) for p in found} == {("cut_through_block", "model.layers.0.mlp.down_proj.weight")}
    assert "cuts 96 columns at 48, which is 1.5 blocks" in found[0]["message"]
    assert found[0]["file"]
    assert inspect(folder, layout=Layout(tp=1))["problems"] == []
    heads = inspect(write(tmp_path / "b", tensors(), config=CONFIG), layout=Layout(tp=3))["problems"]
    assert "tp 3 to divide 4 heads" in heads[0]["message"]
    assert {p["kind"] for p in heads} == {"cut_through_head"}


def test_heads_are_repeated_where_they_are_fewer_than_ranks(tmp_path):
    """Two key heads over four ranks are repeated, which is no problem; the cache of a rank is that of one head."""
    found = inspect(write(tmp_path, tensors(), config=CONFIG), layout=Layout(tp=4), context=100)
    assert found["problems"] == []
    assert {r["cache_bytes"] for r in found["plan"]["ranks"]} == {LAYERS * 2 * DIM * 2 * 100}


@pytest.mark.parametrize(("count", "ranks"), [(7, 3), (2, 4), (0, 2), (12, 4)])
def test_runs_cover_in_order(count, ranks):
    """Every thing lies in one run, runs follow each other and differ by one at most."""
    found = runs(count, ranks)
    assert [n for run_ in found for n in run_] == list(range(count))
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_a_card_too_small_is_said(tmp_path):
    """A rank fits a card or not; without a card nothing is said."""
    folder = write(tmp_path, tensors(), config=CONFIG)
    for gib, fits in ((0.5, False), (2.0, True), (None, None)):
        assert {r["fits"] for r in inspect(folder, card_gib=gib)["plan"]["ranks"]} == {fits}


def test_no_layout(tmp_path):
    """Degrees that cannot be combined are the user's mistake."""
    with pytest.raises(UsageError, match="divide"):
        Layout(tp=4, ep=3)
    with pytest.raises(UsageError, match="at least 1"):
        Layout(tp=0)
    with pytest.raises(CheckpointError):
        inspect(tmp_path)


def test_the_command(tmp_path, capsys):
    """Exit 0 and a plan for a whole checkpoint, 1 and the tensor for a broken one, 4 where there is none; JSON too."""
    folder = write(tmp_path / "good", tensors(), config=CONFIG)
    assert run(["inspect", str(folder), "--tp", "2", "--json", str(tmp_path / "found.json")]) == 0
    assert "no problem found" in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text())["plan"]["layout"] == {"tp": 2, "ep": 1, "pp": 1, "sp": 1}
    broken = tensors()
    del broken["model.layers.2.self_attn.o_proj.weight"]
    folder = write(tmp_path / "broken", broken, config=CONFIG)
    assert run(["inspect", str(folder)]) == 1
    assert "model.layers.2.self_attn.o_proj.weight" in capsys.readouterr().out
    assert run(["inspect", str(tmp_path)]) == 4
    assert run(["inspect", str(tmp_path / "nowhere")]) == 4


def test_the_content_is_read_where_that_is_asked_for(tmp_path, capsys):
    """With --content a NaN and a file that is not the published one are problems; headers alone say nothing of them."""
    weights = tensors()
    weights["model.layers.1.mlp.up_proj.weight"][2, 3] = float("nan")
    folder = write(tmp_path / "ck", weights, config=CONFIG)
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  model-00001-of-00001.safetensors\n")
    assert run(["inspect", str(folder)]) == 0
    capsys.readouterr()
    state = tmp_path / "state.jsonl"
    for _ in range(2):  # the second time from what was kept
        found = tmp_path / "found.json"
        assert run(["inspect", str(folder), "--content", "--resume", str(state), "--json", str(found)]) == 1
        problems = json.loads(found.read_text())["problems"]
        assert {p["kind"] for p in problems if p["severity"] == "error"} == {"digest", "nonfinite"}
        assert "model.layers.1.mlp.up_proj.weight" in {p["tensor"] for p in problems}
    told = capsys.readouterr()
    assert "[2, 3]" in told.out
    assert "about" in told.err
    assert state.is_file()
