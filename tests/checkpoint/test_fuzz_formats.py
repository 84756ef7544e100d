"""Right checkpoints of every format with words, shapes and labels changed at random: problems, never anything else."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

from harness.checkpoint import format_problems, open_checkpoint
from harness.checkpoint.inspect import inspect
from harness.checkpoint.layout import Layout
from harness.checkpoint.scan import content_facts
from harness.errors import CheckpointError
from harness.faults.disk.files import BITS, INDEX, shard_bytes, stored
from harness.faults.disk.writers import FORMATS, write

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
SETTINGS = hypothesis.settings(
    max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(hypothesis.HealthCheck)
)  # fmt: skip

ODD = st.sampled_from([
    None, True, False, -1, 0, 1, 2, 3, 7, 127, 2**31, 2**63, 10**30, 10**400, 0.5, -0.0, 1e308, float("inf"),
    float("nan"), "", "4", "fp8", "é\u0000\ud800", "../..", [], [None], [0, 0], [-1, 128], [128], [1e3, 2], {},
    {"a": {}}, [[]], "re:(a+)+$", ["re:" + "(" * 50], {"weights": None}, [{"weights": {"group_size": "x"}}],
])  # fmt: skip
WORDS = st.sampled_from([
    "quant_method", "format", "fmt", "bits", "num_bits", "group_size", "weight_block_size", "block_structure", "ignore",
    "modules_to_not_convert", "config_groups", "weights", "strategy", "qscheme", "dtype", "desc_act", "version",
    "checkpoint_format", "quant_algo", "global_quant_config", "symmetric", "type", "targets", "expert_dtype",
])  # fmt: skip
LEAVES = st.one_of(ODD, st.dictionaries(WORDS, ODD, max_size=3), st.lists(ODD, max_size=3))


class Right:
    """What is not worth showing where an example fails."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.files = scratch, {name: write(name) for name in FORMATS}

    def __repr__(self) -> str:
        return "right"


@pytest.fixture(scope="module")
def right():
    """Every format once, and a folder to write to."""
    folder = Path(tempfile.mkdtemp())
    yield Right(folder)
    shutil.rmtree(folder)


def put(folder: Path, files, *, edit=None, config: str | None = None, index: str | None = None) -> Path:
    """Write one small shard of a format: enough of it to be recognised."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tensors = {n: t for ts in files.shards.values() for n, t in ts.items() if ".3." in n or "layers" not in n}
    (folder / "model.safetensors").write_bytes(shard_bytes(tensors, edit))
    (folder / "config.json").write_text(config if config is not None else json.dumps(files.config))
    if index is not None:
        (folder / INDEX).write_text(index)
    return folder


def look(folder: Path, *, content: bool = False) -> None:
    """Inspect; whatever is found can be written as JSON, and no error but the named one comes out."""
    try:
        found = inspect(
            folder, layout=Layout(tp=4, ep=2), context=1 << 20, card_gib=0.5, read=content_facts if content else None
        )
    except CheckpointError:
        return
    json.dumps(found, allow_nan=False)


def set_at(value, path: list[int], leaf) -> None:
    """Replace one leaf or branch of a JSON value, found by numbers."""
    at = value
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return
        key = keys[path[0] % len(keys)]
        path = path[1:]
        if not path or not isinstance(at[key], (dict, list)) or not at[key]:
            at[key] = copy.deepcopy(leaf)
            return
        at = at[key]


@SETTINGS
@hypothesis.given(
    name=st.sampled_from(sorted(FORMATS)),
    changes=st.lists(st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=5), LEAVES), min_size=1, max_size=4),
)
def test_words_of_a_configuration(right, name, changes):
    """Any word of a real configuration, at any depth, may be anything."""
    files, scratch = right.files, right.scratch
    config = copy.deepcopy(files[name].config)
    for path, leaf in changes:
        set_at(config, path, leaf)
    look(put(scratch / "a", files[name], config=json.dumps(config)))


@SETTINGS
@hypothesis.given(
    name=st.sampled_from(sorted(FORMATS)),
    key=WORDS,
    value=LEAVES,
    inner=st.booleans(),
    more=st.dictionaries(WORDS, LEAVES),
)
def test_words_of_quantisation(right, name, key, value, inner, more):
    """Any key of a quantisation may be there with anything under it, at the top or in a group."""
    files, scratch = right.files, right.scratch
    words = {**more, key: value}
    words = {"config_groups": {"g": {"weights": words}}, "quant_method": "compressed-tensors"} if inner else words
    look(put(scratch / "b", files[name], config=json.dumps({**files[name].config, "quantization_config": words})))


@SETTINGS
@hypothesis.given(
    name=st.sampled_from(sorted(FORMATS)),
    picks=st.lists(
        st.tuples(
            st.integers(0, 400), st.sampled_from(sorted(BITS)), st.permutations([0, 1, 2]), st.integers(0, 3),
            st.booleans(),
        ),
        min_size=1, max_size=6,
    ),
)  # fmt: skip
def test_labels_of_a_header(right, name, picks):
    """Dtypes and shapes that fit the same bytes, names without their end: headers and one pass end as problems."""
    files, scratch = right.files, right.scratch

    def edit(header):
        names = [n for n in header if n != "__metadata__"]
        for pick, dtype, order, fold, rename in picks:
            at = names[pick % len(names)]
            entry = header.get(at)
            if entry is None:
                continue
            begin, end = entry["data_offsets"]
            shape = [entry["shape"][i] for i in order if i < len(entry["shape"])]
            count = (end - begin) * 8 // BITS[dtype]
            entry["dtype"] = dtype
            entry["shape"] = [count] if fold == 0 or fold > len(shape) else _fitting(shape, count)
            if rename:
                header[at.rsplit(".", 1)[0]] = header.pop(at)

    look(put(scratch / "c", files[name], edit=edit), content=True)


def _fitting(shape: list[int], count: int) -> list[int]:
    """Return a shape of this many elements that keeps as many sizes as it can."""
    found = []
    for size in shape[:-1]:
        if size and count % size == 0:
            found.append(size)
            count //= size
    return [*found, count]


@SETTINGS
@hypothesis.given(
    name=st.sampled_from(sorted(FORMATS)),
    cuts=st.lists(st.tuples(st.integers(0, 30_000), st.binary(max_size=6), st.integers(0, 6)), min_size=1, max_size=5),
)
def test_bytes_of_real_headers_and_indexes(right, name, cuts):
    """A few bytes of a header, an index or a configuration that are others, gone, or too many."""
    files, scratch = right.files, right.scratch
    folder = put(scratch / "d", files[name])
    tensors = open_checkpoint(folder).tensors
    index = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")})
    (folder / INDEX).write_text(index)
    for at, raw, gone in cuts:
        for file in ("model.safetensors", INDEX, "config.json"):
            content = (folder / file).read_bytes()
            at = at % max(1, min(len(content), 40_000))
            (folder / file).write_bytes(content[:at] + raw + content[at + gone :])
    look(folder)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400, "-0.0", '"\\ud800"'])
def test_numbers_that_are_none(right, tmp_path, word):
    """Constants that JSON does not have, and numbers beyond any range, are what any wrong word is."""
    files = right.files
    text = json.dumps(files["fp8_block"].config)
    for key in ("hidden_size", "vocab_size", "num_hidden_layers", "kv_lora_rank", "rope_theta"):
        value = json.dumps(files["fp8_block"].config[key])
        look(put(tmp_path / "x", files["fp8_block"], config=text.replace(f'"{key}": {value}', f'"{key}": {word}')))
    index = '{"metadata": {"total_size": ' + word + '}, "weight_map": {"a": "model.safetensors"}}'
    look(put(tmp_path / "x", files["fp8_block"], index=index))


@pytest.mark.parametrize("name", ["nvfp4_modelopt", "nvfp4_packed"])
def test_a_global_scale_of_two_numbers(right, tmp_path, name):
    """Found by the fuzzer: a second scale of more numbers than matrices is refused from headers, and not decoded."""
    files = right.files[name].copy()
    weight = next(w for w in files.weights.values() if "global" in w.parts and ".3." in w.name)
    value = files.get(weight.parts["global"])
    files.put(weight.parts["global"], stored("F32", np.repeat(value.array("<f4").reshape(-1), 2)))
    folder = put(tmp_path / "x", files)
    (problem,) = [p for p in format_problems(open_checkpoint(folder)) if p.name == weight.name]
    assert "global scale" in problem.found
    look(folder, content=True)
