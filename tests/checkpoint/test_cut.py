"""Some layers of a checkpoint are a checkpoint of their own."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from checkpoint_files import write

from harness.checkpoint import open_checkpoint
from harness.checkpoint.cut import Cut, cut_config, plan_cut, read_cut, write_cut
from harness.checkpoint.cut import files as cut_files
from harness.checkpoint.cut import model as cut_model
from harness.errors import CheckpointError, UsageError

CONFIG = {"num_hidden_layers": 6, "hidden_size": 8, "vocab_size": 16, "first_k_dense_replace": 2}
LEAVES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj", "norm1", "norm2")


def model(folder, *, stack="model.layers", depth=6, config=None, more=(), leaves=LEAVES):
    """Write a checkpoint whose tensors say by their value which layer they are of."""
    tensors = {"model.embed_tokens.weight": torch.full((16, 8), -1.0), "lm_head.weight": torch.full((16, 8), -2.0)}
    for layer in range(depth):
        for leaf in leaves:
            shape = (8,) if "norm" in leaf else (8, 8)
            tensors[f"{stack}.{layer}.{leaf}.weight"] = torch.full(shape, float(layer))
    tensors |= {name: torch.full((8, 8), 50.0) for name in more}
    names = list(tensors)
    half = len(names) // 2
    parts = [{n: tensors[n] for n in names[:half]}, {n: tensors[n] for n in names[half:]}]
    return write(folder, *parts, config=CONFIG if config is None else config)


def values(folder):
    checkpoint = open_checkpoint(folder)
    assert checkpoint.problems == ()
    return {name: float(checkpoint.read(name).flatten()[0]) for name in checkpoint.tensors}


def cut(source, layers, out, **words):
    write_cut(plan_cut(open_checkpoint(source), layers), out, **words)
    return out


@pytest.mark.parametrize("stack", ["model.layers", "transformer.h", "blocks", "model.language_model.layers"])
def test_chosen_layers_are_numbered_anew_and_all_else_is_kept(tmp_path, stack):
    """Each chosen layer holds what it held, under its new number; what is outside of the layers is there untouched."""
    found = values(cut(model(tmp_path / "whole", stack=stack), (0, 3, 5), tmp_path / "cut"))
    expected = {f"{stack}.{new}.{leaf}.weight": float(old) for new, old in enumerate((0, 3, 5)) for leaf in LEAVES}
    assert found == {**expected, "model.embed_tokens.weight": -1.0, "lm_head.weight": -2.0}
    config = json.loads((tmp_path / "cut" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["first_k_dense_replace"]) == (3, 1)
    assert read_cut(tmp_path / "cut") == Cut(layers=(0, 3, 5), depth=6)
    assert read_cut(tmp_path / "whole") is None


def test_layers_after_the_last_follow_the_last(tmp_path):
    """Layers that predict further tokens come after the last one here too, and separate parts keep their names."""
    more = ("model.layers.6.eh_proj.weight", "model.layers.6.enorm.weight", "model.mtp.layers.0.q.weight")
    source = model(tmp_path / "whole", more=more, config={**CONFIG, "num_nextn_predict_layers": 1})
    found = values(cut(source, (1, 4), tmp_path / "cut"))
    assert found["model.layers.2.eh_proj.weight"] == 50.0
    assert "model.mtp.layers.0.q.weight" in found
    assert read_cut(tmp_path / "cut").original(2) == 6


def test_a_layer_of_which_a_list_says_nothing_keeps_its_place(tmp_path):
    """A null in a list of the layers stays null; only names of layers that are left out go."""
    config = {**CONFIG, "layer_choices": [None, None, "a", None, "b", None], "kept": [None, "model.layers.1.mlp"]}
    cut(model(tmp_path / "whole", config=config), (0, 2, 4), tmp_path / "cut")
    found = json.loads((tmp_path / "cut" / "config.json").read_text())
    assert found["layer_choices"] == [None, "a", "b"]
    assert found["kept"] == [None]


def test_modules_named_by_layer_are_renamed_in_the_configuration(tmp_path):
    """Names and patterns of modules that are not quantised get the new numbers; those of layers left out are gone."""
    ignored = [
        "model.layers.1.mlp", "layers.4.self_attn.q_proj", "lm_head", r"re:.*layers\.4\.norm1.*", "model.layers.0",
        r"re:model\.layers\.(0|1|4)\.mlp", "visual.layers.1.mlp", "model.layers.10.mlp",
    ]  # fmt: skip
    config = {**CONFIG, "quantization_config": {"quant_method": "x", "ignore": ignored}}
    plan = plan_cut(open_checkpoint(model(tmp_path / "whole", config=config)), (1, 4))
    assert plan.config["quantization_config"]["ignore"] == [
        "model.layers.0.mlp", "layers.1.self_attn.q_proj", "lm_head", r"re:.*layers\.1\.norm1.*",
        r"re:model\.layers\.(0|1)\.mlp", "visual.layers.1.mlp",
    ]  # fmt: skip


def test_lists_beside_the_layers_go_with_them_or_refuse(tmp_path):
    """A list with an entry for each layer is cut like them; one with all but one is cut at its end only."""
    more = [f"model.gates.{n}" for n in range(6)]
    found = values(cut(model(tmp_path / "a", more=more), (2, 4), tmp_path / "cut-a"))
    assert {n for n in found if "gates" in n} == {"model.gates.0", "model.gates.1"}
    fewer = model(tmp_path / "b", more=[f"model.queries.{n}" for n in range(5)])
    with pytest.raises(UsageError, match=r"model\.queries holds 5 entries for 6 layers.*0-1"):
        plan_cut(open_checkpoint(fewer), (2, 4))
    first = values(cut(fewer, (0, 1, 2), tmp_path / "cut-b"))
    assert {n for n in first if "queries" in n} == {"model.queries.0", "model.queries.1"}


def test_what_cannot_be_cut_says_so(tmp_path):
    """Layers beyond the last, absent layers, a cut of a cut and an encoder beside a decoder are refused with words."""
    source = model(tmp_path / "whole")
    with pytest.raises(UsageError, match="expected layers of 0-5, found 4,6"):
        plan_cut(open_checkpoint(source), (4, 6))
    short = model(tmp_path / "short", depth=4)
    with pytest.raises(CheckpointError, match="found none of 5"):
        plan_cut(open_checkpoint(short), (0, 5))
    with pytest.raises(UsageError, match="is cut already"):
        plan_cut(open_checkpoint(cut(source, (0, 1), tmp_path / "cut")), (0,))
    with pytest.raises(UsageError, match="an encoder and a decoder"):
        plan_cut(open_checkpoint(model(tmp_path / "t5", config={**CONFIG, "is_encoder_decoder": True})), (0, 1))


def test_a_cut_that_its_configuration_contradicts_is_refused(tmp_path, monkeypatch):
    """What the cut's tensors and its configuration disagree in, and those of the whole do not, refuses the cut."""
    more = [f"model.layers.{n}.mlp.experts.{e}.up.weight" for n in (2, 3, 4, 5) for e in range(4)]
    checkpoint = open_checkpoint(model(tmp_path / "whole", more=more, config={**CONFIG, "num_experts": 4}))
    plan_cut(checkpoint, (0, 2, 3))
    wrong = {**CONFIG, "num_experts": 9, "num_hidden_layers": 3}
    monkeypatch.setattr(cut_model, "cut_config", lambda *_, **__: (wrong, ()))
    with pytest.raises(UsageError, match=r"are no model of their own: .*expected 9 experts"):
        plan_cut(checkpoint, (0, 2, 3))


def test_words_beside_the_weights_are_copied_and_digests_are_not(tmp_path):
    """Tokenizer and templates go with a cut; digests of the whole's files, an index and links that leave do not."""
    source = model(tmp_path / "whole")
    for name in ("tokenizer.json", "chat_template.jinja", "SHA256SUMS.txt", "day0-manifest.json", "modeling.py"):
        (source / name).write_text("{}")
    (tmp_path / "outside.json").write_text("{}")
    (source / "link.json").symlink_to(tmp_path / "outside.json")
    found = {p.name for p in cut(source, (1, 2), tmp_path / "cut").iterdir()}
    expected = {"config.json", "day0-cut.json", "model.safetensors"}
    assert found == expected | {"tokenizer.json", "chat_template.jinja", "modeling.py"}


# --- writing ---


def test_a_writing_that_was_broken_off_goes_on(tmp_path, monkeypatch):
    """Shards that were finished are kept; nothing stands under the final name before everything is there."""
    monkeypatch.setattr(cut_files, "SHARD_BYTES", 2000)
    source = model(tmp_path / "whole")
    plan = plan_cut(open_checkpoint(source), (0, 2, 4))
    real, done = cut_files._write_piece, []

    def broken(out, piece):
        if len(done) == 9:
            raise OSError("the disk went away")
        done.append(piece.name)
        real(out, piece)

    monkeypatch.setattr(cut_files, "_write_piece", broken)
    with pytest.raises(UsageError, match="the disk went away"):
        write_cut(plan, tmp_path / "cut")
    assert not (tmp_path / "cut").exists()
    again = []
    monkeypatch.setattr(cut_files, "_write_piece", lambda out, piece: (again.append(piece.name), real(out, piece)))
    write_cut(plan, tmp_path / "cut")
    assert 0 < len(again) < len(plan.pieces)
    assert values(tmp_path / "cut")["model.layers.2.norm2.weight"] == 4.0
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_bytes_are_the_same_where_the_kernel_cannot_copy(tmp_path, monkeypatch):
    """Read and written, or copied inside the kernel: the files are the same."""
    source = model(tmp_path / "whole")
    cut(source, (1, 2), tmp_path / "a")

    def never(*_):
        raise OSError(18, "another file system")

    monkeypatch.setattr(cut_files.os, "copy_file_range", never, raising=False)
    cut(source, (1, 2), tmp_path / "b")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    """The room on the disk is asked for first, in GiB, with what to do."""
    monkeypatch.setattr(cut_files.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(UsageError, match=r"expected room for .* GiB in .*choose fewer layers"):
        cut(model(tmp_path / "whole"), (1, 2), tmp_path / "cut")


def test_hollow_files_have_the_headers_and_no_bytes(tmp_path):
    """A hollow cut reads like the true one from its headers, and takes no disk for its tensors."""
    source = model(tmp_path / "whole")
    a = open_checkpoint(cut(source, (1, 2), tmp_path / "a"))
    b = open_checkpoint(cut(source, (1, 2), tmp_path / "b", hollow=True))
    assert {n: (r.shape, r.begin) for n, r in a.tensors.items()} == {
        n: (r.shape, r.begin) for n, r in b.tensors.items()
    }
    assert b.problems == ()


def test_the_digest_knows_content_and_layers(tmp_path):
    """Another value, or another choice, gives another digest; the same checkpoint elsewhere the same."""
    plan = plan_cut(open_checkpoint(model(tmp_path / "a")), (1, 2))
    assert plan.digest == plan_cut(open_checkpoint(model(tmp_path / "b")), (1, 2)).digest
    assert plan.digest != plan_cut(open_checkpoint(tmp_path / "a"), (1, 3)).digest
    file = next((tmp_path / "b").glob("*1-of-*.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(bytes(raw))
    assert plan_cut(open_checkpoint(tmp_path / "b"), (1, 2)).digest != plan.digest
    outside = [plan_cut(open_checkpoint(tmp_path / name), (4, 5)).digest for name in "ab"]
    assert outside[0] == outside[1]


def test_layers_are_told_by_their_number_in_the_whole_model():
    """A place in a cut model is told as a place in the whole one; kept numbers and other towers are not mentioned."""
    found = Cut(layers=(0, 3, 47), depth=93, extra=(93,))
    assert found.told("layers.2.attn.q") == "layer 2 here is layer 47 of the whole model"
    assert found.told("layers.0.mlp", "vision.blocks.1", "model.layers.1.mlp.up.weight") == (
        "layer 1 here is layer 3 of the whole model"
    )
    assert found.told("model.layers.3.eh_proj") == "layer 3 here is layer 93 of the whole model"
    assert found.told("logits", "experts.3.weight") == ""
    assert found.sentence.startswith("a model cut to layers 0,3,47 of 93, at true width")


# --- configurations ---

L = {"num_hidden_layers": 12}


KEYS = {
    "a list of kinds": ({"layer_types": list("abcabcabcabc")}, (0, 4), {"layer_types": ["a", "b"]}),
    "a list of layers": ({"mlp_only_layers": [0, 5, 11]}, (0, 4, 5), {"mlp_only_layers": [0, 2]}),
    "layers in a text": ({"moe_layers_enum": "4,5,6,11"}, (0, 4, 5), {"moe_layers_enum": "1,2"}),
    "layers from 1 on": (
        {"attn": {"kda_layers": [1, 2, 4], "full_layers": [3, 12]}}, (2, 3),
        {"attn": {"kda_layers": [2], "full_layers": [1]}},
    ),
    "a letter each": ({"hybrid_override_pattern": "M-M-M*-MEM-M"}, (0, 5, 6), {"hybrid_override_pattern": "M*-"}),
    "a pattern in a text": ({"sliding_window_pattern": "LLLG"}, (0, 3, 7), {"sliding_window_pattern": "LGG"}),
    "a pattern in a list": ({"block_types": ["r", "r", "a"]}, (0, 2, 3, 5), {"block_types": ["r", "a"]}),
    "one entry more": ({"compress_ratios": [0, 0, *[4, 128] * 5, 0]}, (0, 3), {"compress_ratios": [0, 128, 0]}),
    "start and end": (
        {"moe_layer_start_index": 3, "moe_layer_end_index": 11}, (0, 4, 11),
        {"moe_layer_start_index": 1, "moe_layer_end_index": 2},
    ),
    "first layers": (
        {"num_hash_layers": 3, "max_window_layers": 12}, (0, 2, 7), {"num_hash_layers": 2, "max_window_layers": 3},
    ),
    "a period and its offset": (
        {"attn_layer_period": 8, "attn_layer_offset": 4}, (3, 4), {"attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "a period that a list shows": (
        {"full_attention_interval": 4, "layer_types": list("lllf" * 3)}, (0, 3),
        {"full_attention_interval": 2, "layer_types": ["l", "f"]},
    ),
    "a table by layer": ({"layer_cfg": {str(n): n for n in range(12)}}, (2, 7), {"layer_cfg": {"0": 2, "1": 7}}),
    "another tower": ({"vision_config": {"num_hidden_layers": 12, "layer_types": ["v"] * 12}}, (0, 1), {}),
    "lists of as many": ({"rope_scaling": {"long_factor": [1.0] * 12}, "eos_token_id": list(range(12))}, (0, 1), {}),
    "a configuration within": (
        {"text_config": {"num_hidden_layers": 12, "first_k_dense_replace": 3}}, (2, 3),
        {"text_config": {"num_hidden_layers": 2, "first_k_dense_replace": 1}},
    ),
    "a configuration within one of another depth": (
        {"num_hidden_layers": 40, "text_config": {"num_hidden_layers": 12, "full_attention_interval": 4}}, (0, 1, 2, 3),
        {"num_hidden_layers": 40, "text_config": {"num_hidden_layers": 4, "full_attention_interval": 4}},
    ),
    "one layer by its number": ({"probe_layer_idx": 7}, (0, 7), {"probe_layer_idx": 1}),
    "last layers that borrow": (
        {"num_kv_shared_layers": 4, "layer_types": list("ssssfsssssff")}, (4, 7, 9, 11),
        {"num_kv_shared_layers": 2, "layer_types": ["f", "s", "s", "f"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "layers", "expected"), KEYS.values(), ids=list(KEYS))
def test_keys_that_say_something_of_layers(config, layers, expected):
    """Each kind of key that speaks of layers describes the chosen ones afterwards, and no other key is touched."""
    found, _ = cut_config({**L, **config}, layers)
    assert found == {**L, **config, "num_hidden_layers": len(layers), **expected}


@pytest.mark.parametrize(
    ("config", "layers", "words"),
    [
        ({"full_attention_interval": 4}, (0, 3), "full_attention_interval = 4 .*layers 0-3 or layers 0,5 keep"),
        ({"decoder_sparse_step": 2}, (0, 2), "decoder_sparse_step = 2 .*layers 0-1 or layers 0,3"),
        ({"indexer_types": ["full", "shared", "shared"] * 4}, (0, 4), "layer 4 goes on with what layer 3 computed"),
        ({"num_kv_shared_layers": 4}, (0, 9), "layer 9 uses the keys and values of layer 7"),
        ({"cla_share_factor": 2}, (0, 3), "layer 3 uses what layer 2 computed"),
        ({"cla_share_factor": 2}, (0, 2), "cla_share_factor = 2 cannot say"),
        ({"num_mem_blocks": 2}, (0, 3), "choose the first layers without a gap"),
        ({"probe_layer_idx": 7}, (0, 3), "probe_layer_idx names layer 7"),
        ({"hidden_size_per_layer_input": 256}, (0, 1), "one embedding holds the rows of all 12 layers"),
    ],
)
def test_layers_that_are_no_model_of_their_own(config, layers, words):
    """What a key cannot say of the chosen layers is refused, with layers that could be chosen instead."""
    with pytest.raises(UsageError, match=words):
        cut_config({**L, **config}, layers)


def test_a_kind_of_layer_that_is_left_out_is_noted():
    """What no chosen layer does is said, with the layers that do it."""
    kinds = ["linear", "linear", "full"] * 4
    assert cut_config({**L, "layer_types": kinds}, (0, 2))[1] == ()
    _, notes = cut_config({**L, "layer_types": kinds}, (0, 3))
    assert notes == ("no chosen layer is of kind full (layer_types); layers 2,5,8,11 are",)


def test_absurd_numbers_of_layers_take_no_time():
    """A depth or a period that no model has is refused, or left alone, at once."""
    with pytest.raises(UsageError, match="at most 100000 layers"):
        cut_config({"num_hidden_layers": 1 << 39}, (0, 1))
    assert cut_config({**L, "full_attention_interval": 1 << 39}, (0, 3))[0]["full_attention_interval"] == 1 << 39


def test_a_period_still_holds_where_remainders_do():
    """Layers whose new numbers have the old remainders keep a period, whatever it is of."""
    found, notes = cut_config({**L, "full_attention_interval": 4}, (0, 1, 2, 3, 8))
    assert (found["full_attention_interval"], notes) == (4, ())


def test_tensors_show_which_layer_of_a_period_is_special():
    """A set of layers that hold a tensor of their own says which remainder a period means."""
    special = frozenset({frozenset({3, 7, 11})})
    assert cut_config({**L, "full_attention_interval": 4}, (0, 3), holders=special)[0]["full_attention_interval"] == 2
    assert cut_config({**L, "full_attention_interval": 4}, (3, 7), holders=special)[0]["full_attention_interval"] == 1
    with pytest.raises(UsageError, match="cannot say"):
        cut_config({**L, "full_attention_interval": 4}, (0, 3, 7), holders=special)
