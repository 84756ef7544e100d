"""Headers, indexes and configurations from nowhere: the only way out is a problem, or the named error."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from checkpoint_files import shard, write
from test_inspect import CONFIG, PACKED, tensors

from harness.checkpoint import open_checkpoint
from harness.checkpoint.inspect import inspect
from harness.checkpoint.layout import Layout
from harness.errors import CheckpointError

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
SETTINGS = hypothesis.settings(
    max_examples=120, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip

NAMES = st.sampled_from([
    "a", "model.layers.0.q_proj.weight", "model.layers.0.q_proj.weight_scale", "x.weight_packed", "x.weight_shape",
    "x.weight_scale", "e_blocks", "e_scales", "q.qweight", "q.qzeros", "q.scales", "q.g_idx", "..", "",
    "model.layers.9999999.x", "model.layers.00.x.weight", "\ud800", "__metadata__", "é\u0000", "model.layers.\u0663.x",
])  # fmt: skip
DTYPES = st.sampled_from(["U8", "I32", "F8_E4M3", "F8_E8M0", "BF16", "F4", "I64", "F32", "F12", "", None, 3, []])
NUMBERS = st.one_of(
    st.integers(-3, 9), st.sampled_from([2**31, 2**63, 2**64, 10**30, True, 1.0, 1.5, None, "1", float("inf")])
)
JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)),
    max_leaves=12,
)
ENTRIES = st.one_of(
    st.fixed_dictionaries({
        "dtype": DTYPES, "shape": st.one_of(st.lists(NUMBERS, max_size=4), JUNK),
        "data_offsets": st.one_of(st.lists(NUMBERS, min_size=1, max_size=3), JUNK),
    }),
    JUNK,
)  # fmt: skip


@pytest.fixture(scope="module")
def scratch():
    folder = Path(tempfile.mkdtemp())
    yield folder
    shutil.rmtree(folder)


def look(folder: Path) -> None:
    """Inspect; anything but the named error escapes and fails the test. What is found can be written as JSON."""
    try:
        found = inspect(folder, layout=Layout(tp=2, ep=2, pp=2), context=100, card_gib=1.0)
    except CheckpointError:
        return
    json.dumps(found, allow_nan=False)


def put(folder: Path, *, header: bytes | None = None, index: bytes | None = None, config: bytes | None = None) -> Path:
    """Write a folder of a few hostile bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    name = "model-00001-of-00001.safetensors" if index is not None else "model.safetensors"
    if header is not None:
        (folder / name).write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 64)
    if index is not None:
        (folder / "model.safetensors.index.json").write_bytes(index)
    if config is not None:
        (folder / "config.json").write_bytes(config)
    return folder


@SETTINGS
@hypothesis.given(entries=st.dictionaries(NAMES, ENTRIES, max_size=5))
def test_headers_from_nowhere(scratch, entries):
    """A header of any JSON ends as problems."""
    look(put(scratch / "a", header=json.dumps(entries).encode()))


STEMS = ("x", "model.layers.0.mlp.experts.1.up_proj", "model.layers.1.self_attn.q_proj")
ENDS = (
    ".weight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_shape", "_blocks", "_scales",
    ".qweight", ".qzeros", ".scales", ".g_idx", ".weight_global_scale", ".weight_scale_2",
    ".weight_zero_point", ".scale",
)  # fmt: skip


def _tiled(pairs):
    header, position = {}, 0
    sizes = {"U8": 1, "I32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "I64": 8, "F32": 4}
    for name, dtype, shape in pairs:
        count = sizes[dtype]
        for n in shape:
            count *= n
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + count]}
        position += count
    return header, position


@SETTINGS
@hypothesis.given(
    pairs=st.lists(
        st.tuples(
            st.sampled_from([stem + end for stem in STEMS for end in ENDS]),
            st.sampled_from(["U8", "I32", "F8_E4M3", "F8_E8M0", "BF16", "I64", "F32"]),
            st.lists(st.integers(0, 5), max_size=4),
        ),
        max_size=7, unique_by=lambda p: p[0],
    ),
    config=st.sampled_from([
        {}, {"quantization_config": {"weight_block_size": [2, 2]}},
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 2}},
        {"quantization_config": {"quant_method": "awq", "bits": 3, "group_size": -1}},
        {"quantization_config": {**PACKED, "config_groups": {"g": {"weights": {"group_size": 0, "num_bits": 99}}}}},
    ]),
)  # fmt: skip
def test_parts_in_any_combination(scratch, pairs, config):
    """Whole headers of parts that do not belong together, with shapes of any rank, end as problems."""
    header, size = _tiled(pairs)
    folder = put(scratch / "b", header=json.dumps(header).encode(), config=json.dumps(config).encode())
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.truncate(8 + len(json.dumps(header).encode()) + size)
    look(folder)


CONFIG_KEYS = st.sampled_from([
    *CONFIG, "text_config", "quantization_config", "vision_config", "layer_types", "kv_lora_rank", "sliding_window",
    "num_nextn_predict_layers", "linear_attn_config", "first_k_dense_replace", "dtype", "architectures", "quant_method",
    "full_attention_interval", "mamba_d_state", "ignore", "config_groups", "weight_block_size", "bits",
])  # fmt: skip
CONFIGS = st.recursive(
    st.dictionaries(CONFIG_KEYS, JUNK, max_size=6),
    lambda inner: st.dictionaries(CONFIG_KEYS, st.one_of(inner, JUNK), max_size=4), max_leaves=6,
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(scratch):
    return write(scratch / "c", tensors(experts=True, packed=True), config=CONFIG)


@SETTINGS
@hypothesis.given(config=st.one_of(CONFIGS, CONFIGS.map(lambda c: {**CONFIG, **c}), JUNK))
def test_configurations_from_nowhere(whole, config):
    """A configuration of any JSON over whole tensors ends as problems."""
    (whole / "config.json").write_text(json.dumps(config))
    look(whole)


@SETTINGS
@hypothesis.given(
    index=st.one_of(
        JUNK,
        st.fixed_dictionaries({
            "weight_map": st.one_of(JUNK, st.dictionaries(NAMES, st.one_of(JUNK, st.sampled_from([
                "model-00001-of-00001.safetensors", "../x.safetensors", "/etc/passwd", "..", ".", "a\0b", "x" * 300,
                "\ud800", "MODEL-00001-of-00001.safetensors", "model-00001-of-99999.safetensors",
            ])), max_size=5)),
            "metadata": st.one_of(JUNK, st.fixed_dictionaries({"total_size": NUMBERS})),
        }),
    )
)  # fmt: skip
def test_indexes_from_nowhere(scratch, index):
    """An index of any JSON, with names of any kind, ends as problems and opens nothing outside the folder."""
    header = json.dumps({"a": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}).encode()
    look(put(scratch / "d", header=header, index=json.dumps(index).encode()))


@SETTINGS
@hypothesis.given(raw=st.binary(max_size=200), cut=st.integers(0, 400))
def test_bytes_from_nowhere(scratch, raw, cut):
    """Files of any bytes, and right files cut or overwritten anywhere, end as problems."""
    folder = put(scratch / "e", header=raw, index=raw, config=raw)
    look(folder)
    right = shard({"a": torch.zeros(3, 5), "b": torch.zeros(7)})
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((right[:cut] + raw + right[cut + len(raw) :])[: max(cut, 9)])
    look(folder)


PLAIN = {
    "an empty header": b"",
    "no UTF-8": b'{"\xff": 1}',
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 50_000,
    "a number of many digits": b'{"a": ' + b"1" * 5000 + b"}",
    "a size as a float": b'{"a": {"dtype": "U8", "shape": [64.0], "data_offsets": [0, 64]}}',
    "a size as a truth": b'{"a": {"dtype": "U8", "shape": [true], "data_offsets": [0, 1]}}',
    "a size beyond 64 bits": b'{"a": {"dtype": "U8", "shape": [18446744073709551617], "data_offsets": [0, 64]}}',
    "a product that wraps": b'{"a": {"dtype": "U8", "shape": [4294967296, 4294967296], "data_offsets": [0, 0]}}',
    "too many axes": b'{"a": {"dtype": "U8", "shape": [' + b"1," * 40 + b'1], "data_offsets": [0, 1]}}',
    "offsets backwards": b'{"a": {"dtype": "U8", "shape": [2], "data_offsets": [4, 2]}}',
    "a negative offset": b'{"a": {"dtype": "U8", "shape": [2], "data_offsets": [-2, 0]}}',
    "NaN": b'{"a": {"dtype": "U8", "shape": [NaN], "data_offsets": [0, 1]}}',
}


@pytest.mark.parametrize("what", PLAIN)
def test_each_odd_header_is_refused(tmp_path, what):
    """What a header must not be is a problem of that file."""
    folder = put(tmp_path / "x", header=PLAIN[what])
    assert open_checkpoint(folder).tensors == {}
    assert [p.file for p in open_checkpoint(folder).problems] == ["model.safetensors"]
    look(folder)


def test_crowded_json_is_not_parsed(tmp_path):
    """A million empty objects in a few megabytes would take a hundred times that to parse: they are counted instead."""
    (problem,) = open_checkpoint(put(tmp_path / "x", header=b"[" + b"{}," * 1_000_000 + b"{}]")).problems
    assert "in 3000004 bytes" in problem.found


@pytest.mark.parametrize(
    "key", ["num_experts", "num_hidden_layers", "num_attention_heads", "vocab_size", "sliding_window"]
)
@pytest.mark.parametrize("value", [0, -1, 10**30, 1 << 39])
def test_absurd_sizes_are_no_sizes(whole, key, value):
    """A configuration may give any number: nothing is allocated or divided by it."""
    (whole / "config.json").write_text(json.dumps({**CONFIG, key: value}))
    look(whole)


def test_no_duplicate_key_hides_behind_another_mistake(tmp_path):
    """A key that stands twice beside an entry that lacks one is refused, and so is one in an index of a megabyte."""
    for header in (
        b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": {"shape": [1], "data_offsets": [0, 1]}}',
        b'{"a": {"dtype": "U8", "dtype": "I8", "shape": [64], "data_offsets": [0, 64]}}',
        b'{"__metadata__": {"x": "1", "x": "2"}, "a": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}',
    ):
        assert [p.kind for p in open_checkpoint(put(tmp_path / "x", header=header)).problems] == ["duplicate_key"]
    names = ", ".join(f'"{n:040d}": "model-00001-of-00001.safetensors"' for n in range(15_000))
    for again in ("", f', "{7:040d}": "model-00001-of-00001.safetensors"'):
        folder = put(tmp_path / "y", header=b"{}", index=f'{{"weight_map": {{{names}{again}}}}}'.encode())
        assert ("duplicate_key" in {p.kind for p in open_checkpoint(folder).problems}) == bool(again)


def test_odd_files_are_never_opened(tmp_path):
    """A shard that is a folder, a pipe, a device or a link to itself is named and not opened."""
    index = {
        "weight_map": {
            "a": "dir.safetensors",
            "b": "pipe.safetensors",
            "c": "null.safetensors",
            "d": "loop.safetensors",
        }
    }
    folder = put(tmp_path / "x", index=json.dumps(index).encode())
    (folder / "dir.safetensors").mkdir()
    os.mkfifo(folder / "pipe.safetensors")
    os.mkfifo(folder / "config.json")
    os.symlink("/dev/zero", folder / "null.safetensors")
    os.symlink("loop.safetensors", folder / "loop.safetensors")
    checkpoint = open_checkpoint(folder)
    named = {p.file for p in checkpoint.problems if p.kind == "unsafe_name"}
    assert named == {"dir.safetensors", "pipe.safetensors", "null.safetensors", "loop.safetensors"}
    assert ("bad_config", "config.json") in {(p.kind, p.file) for p in checkpoint.problems}


def test_names_that_differ_by_case_and_numbers_left_out(tmp_path):
    """Two shards that are one on some systems, and a number that nothing names, are told."""
    folder = write(tmp_path, {"a": torch.zeros(2)}, {"b": torch.zeros(2)}, {"c": torch.zeros(2)})
    shutil.copy(folder / "model-00001-of-00003.safetensors", folder / "Model-00001-of-00003.safetensors")
    assert "case_collision" in {p.kind for p in open_checkpoint(folder).problems}
    folder = write(tmp_path / "b", {"a": torch.zeros(2)}, {"b": torch.zeros(2)}, {"c": torch.zeros(2)})
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["b"]
    del index["metadata"]
    path.write_text(json.dumps(index))
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert {(p.severity, p.kind) for p in open_checkpoint(folder).problems} == {("warning", "shard_numbers")}


def test_two_shards_that_were_swapped_are_told(tmp_path):
    """Two files that exchanged their names: every tensor is named with the file and byte where it lies."""
    folder = write(tmp_path, {"a": torch.zeros(2)}, {"b": torch.zeros(3)})
    one, two = folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors"
    one.rename(folder / "x")
    two.rename(one)
    (folder / "x").rename(two)
    problems = [p for p in open_checkpoint(folder).problems if p.kind == "not_in_shard"]
    assert {p.name for p in problems} == {"a", "b"}
    assert all("in model-0000" in p.found and "at byte" in p.found for p in problems)
