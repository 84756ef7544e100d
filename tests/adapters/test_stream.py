"""A streamed model is the model: same weights, same values, same errors, a window of memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from harness.adapter import silent
from harness.adapters.module import ModuleAdapter
from harness.adapters.stream import StreamedAdapter, streamed_module
from harness.cases import text_case
from harness.errors import CheckpointError, SpecError
from harness.faults import models
from harness.recorder import Pins, TraceRecorder
from harness.types import Setup

pytest.importorskip("transformers")
ARCHITECTURES = tuple(models.CONFIGS)
Opened = Callable[..., ModuleAdapter]


def setup_of(folder: Path, dtype: str, stream: str, role: str = "oracle") -> Setup:
    return Setup(side="reference", role=role, adapter=f"hf:{folder}", dtype=dtype, options={"stream": stream})


def open_one(folder: Path, dtype: str = "float32", stream: str = "1") -> ModuleAdapter:
    from harness.adapters.hf import hf_adapter

    setup = setup_of(folder, dtype, stream)
    adapter = hf_adapter(folder, setup)
    adapter.load(folder, setup)
    return adapter


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("narrow")
    return lambda name: models.build(name, root / name, dtype="bfloat16")


def observed(adapter: ModuleAdapter, length: int = 23, pins: Pins | None = None) -> TraceRecorder:
    recorder = TraceRecorder(pins=pins)
    inputs = adapter.prepare(text_case(adapter.info, length), recorder)
    recorder.span(0, length)
    adapter.forward(inputs, recorder)
    return recorder


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return list(actual) == list(expected) and all(
        a.dtype == b.dtype and torch.equal(a.view(bits[a.element_size()]), b.view(bits[b.element_size()]))
        for a, b in ((actual[name].contiguous(), expected[name].contiguous()) for name in actual)
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_and_tables_are_those_of_a_load(folder_of: Callable[[str], Path], name: str) -> None:
    """Every parameter and table of every architecture comes out bit-equal to from_pretrained, in the same dtype."""
    streamed, whole = open_one(folder_of(name), "bfloat16"), open_one(folder_of(name), "bfloat16", "0")
    actual, expected = ({w.name: w.tensor for w in side.weights()} for side in (streamed, whole))
    assert same(dict(sorted(actual.items())), dict(sorted(expected.items())))
    assert same(dict(streamed.tables()), dict(whole.tables()))
    assert streamed._ready().facts == whole._ready().facts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "glm5_next"])
def test_forwards_replays_chunks_and_steps_are_bit_equal(
    folder_of: Callable[[str], Path], name: str, dtype: str
) -> None:
    """Prefill, replays, chunks and single steps give the very bits of the model that was loaded whole."""
    sides = [open_one(folder_of(name), dtype, stream) for stream in "10"]
    free = [observed(side) for side in sides]
    assert same(free[0].tensors(), free[1].tensors())
    for level in (1, 3):
        pins = Pins(tensors=free[1].tensors(), taps=free[1].taps, level=level, dtype=torch.bfloat16, decisions=True)
        replayed = [observed(side, pins=pins).tensors() for side in sides]
        assert same(*replayed)
    logits = []
    for side in sides:
        inputs = side.prepare(text_case(side.info, 12), silent)
        slot = side.open()
        spans = [(0, 5), (5, 10), (10, 11), (11, 12)]
        logits.append({str(a): side.step(slot, inputs, a, b, silent) for a, b in spans})
        side.free(slot)
    assert same(*logits)


def test_nothing_but_the_window_is_in_memory(folder_of: Callable[[str], Path]) -> None:
    """Between forwards every streamed parameter is empty; while a layer runs, it alone is in, and the next one made."""
    adapter = open_one(folder_of("qwen3_moe"))
    assert isinstance(adapter, StreamedAdapter)
    module, window = adapter._ready().module, adapter.window
    seen: list[int] = []
    ahead: list[str] = []
    layers = [module.get_submodule(path) for path in adapter.structure.layers]

    def count(*_: object) -> None:
        seen.append(sum(any(not p.is_meta for p in layer.parameters()) for layer in layers))
        ahead.append(window._ahead[0] if window._ahead else "")

    for layer in layers:
        layer.register_forward_pre_hook(count)
    observed(adapter)
    assert seen == [1] * len(layers)
    assert ahead[:-1] == list(adapter.structure.layers[1:])
    assert all(p.is_meta for p in module.parameters())


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    """A head that is tied and not stored has the embedding's values, in forwards and among the weights."""
    folder = models.build("llama", tmp_path / "tied", dtype="bfloat16", tie_word_embeddings=True)
    streamed, whole = open_one(folder), open_one(folder, stream="0")
    weights = {w.name: w.tensor for w in streamed.weights()}
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert same(observed(streamed).tensors(), observed(whole).tensors())


def test_several_precisions_walk_in_one_pass(folder_of: Callable[[str], Path]) -> None:
    """Forwards in two precisions go through the layers together: same values, each unit read once for all of them."""
    lead = open_one(folder_of("qwen3_moe"))
    assert isinstance(lead, StreamedAdapter)
    sides: list[ModuleAdapter] = [lead]
    for dtype in ("bfloat16", "bfloat16", "float64"):
        setup = setup_of(lead.checkpoint, dtype, "1")
        sides.append(lead.beside(setup))
        sides[-1].load(lead.checkpoint, setup)
    alone = [observed(side).tensors() for side in sides]
    before = lead.window.brought
    together = lead.together([lambda side=side: observed(side).tensors() for side in sides])
    assert lead.window.brought - before == len(lead.window.units)
    assert all(
        isinstance(found, dict) and same(found, expected) for found, expected in zip(together, alone, strict=True)
    )


def test_one_that_fails_does_not_stop_the_others(folder_of: Callable[[str], Path]) -> None:
    """What one of several forwards raises is its own answer; the rest finish."""
    lead = open_one(folder_of("llama"))
    assert isinstance(lead, StreamedAdapter)

    def broken() -> None:
        raise ValueError("of its own")

    found = lead.together([broken, lambda: observed(lead).tensors()])
    assert isinstance(found[0], ValueError)
    assert isinstance(found[1], dict)


@pytest.mark.parametrize("damage", ["vanished", "shrunk", "replaced"])
def test_a_shard_that_changes_is_named(tmp_path: Path, damage: str) -> None:
    """A shard that vanishes, shrinks or is replaced while a model streams is an error that names it."""
    folder = models.build("llama", tmp_path / "model", dtype="bfloat16")
    adapter = open_one(folder)
    observed(adapter)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"]["model.layers.2.mlp.up_proj.weight"]
    data = shard.read_bytes()
    shard.unlink()
    if damage != "vanished":
        shard.write_bytes(data[:-64] if damage == "shrunk" else data)
    with pytest.raises(CheckpointError, match=shard.name):
        observed(adapter)
    assert all(p.is_meta for p in adapter._ready().module.parameters())


def test_packed_weights_are_decoded_by_the_house(tmp_path: Path) -> None:
    """MXFP4 experts, stored [out, in] where the module multiplies with [in, out], arrive as their decoded values."""
    folder = models.build("gpt_oss", tmp_path / "packed", dtype="bfloat16")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    state = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    draw = torch.Generator().manual_seed(0)
    codes: dict[str, tuple[Tensor, Tensor]] = {}
    for name in [n for n in state if n.endswith(("gate_up_proj", "down_proj")) and "experts" in n]:
        experts, inner, outer = state.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8, generator=draw)
        scales = torch.randint(118, 124, (experts, outer, inner // 32), dtype=torch.uint8, generator=draw)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        codes[name] = blocks, scales
    save_file(state, folder / "model.safetensors")
    found = {w.name: w.tensor for w in open_one(folder).weights()}
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name, (blocks, scales) in codes.items():
        pairs = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], dim=-1).flatten(-2)
        expected = (pairs * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).transpose(-1, -2)
        assert torch.equal(found[name], expected)
    observed(open_one(folder, "bfloat16"))


def test_merged_experts_are_decoded_each(tmp_path: Path) -> None:
    """FP8 experts with block scales are decoded one by one, and merged as the library merges plain ones."""
    folder = models.build("deepseek_v3", tmp_path / "fp8", dtype="bfloat16")
    plain = {w.name: w.tensor for w in open_one(folder).weights()}
    state = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    for name in [n for n in state if ".experts." in n]:
        codes = state[name].float().mul(4).to(torch.float8_e4m3fn)  # one block: the scale undoes the factor
        state |= {name: codes, f"{name}_scale_inv": torch.full((1, 1), 0.25)}
    save_file(state, folder / "model.safetensors")
    words = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": words}))
    found = {w.name: w.tensor for w in open_one(folder).weights()}
    assert found.keys() == plain.keys()
    for name, value in plain.items():
        rounded = value.mul(4).to(torch.float8_e4m3fn).float() / 4 if ".experts." in name else value
        assert torch.equal(found[name], rounded), name


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss"])
def test_a_declared_precision_is_that_of_a_load(folder_of: Callable[[str], Path], name: str) -> None:
    """A floor that rounds weights, inputs and caches as declared gives the same bits streamed, twice in a row."""
    from harness.adapters.hf import hf_adapter
    from harness.runs import opened

    declared = {"weights": "float8_e4m3fn:channel", "activations": "int8:token", "cache": "float8_e4m3fn:head"}
    folder, found = folder_of(name), []
    for stream in "10":
        setup = replace(setup_of(folder, "bfloat16", stream, role="floor"), precision=declared)
        adapter = hf_adapter(folder, setup)
        opened(adapter, folder, setup)
        found += [observed(adapter).tensors(), observed(adapter).tensors()]
    assert all(same(found[0], each) for each in found[1:])
    assert not same(found[0], observed(open_one(folder, "bfloat16")).tensors())


def test_a_module_of_ones_own_can_stream(tmp_path: Path) -> None:
    """A module on the meta device whose names are the checkpoint's streams too; one with other names is refused."""
    whole = models_own()
    save_file(dict(whole.state_dict()), tmp_path / "model.safetensors")
    words = {"model_type": "own", "vocab_size": 32, "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(words))
    setup = Setup(side="accel", role="accel", adapter="own", dtype="float32")
    with torch.device("meta"):
        empty, other = models_own(), nn.Linear(2, 2)
    adapter = streamed_module(empty, tmp_path, setup, name="own")
    adapter.load(tmp_path, setup)
    inputs = adapter.prepare(text_case(adapter.info, 7), silent)
    assert torch.equal(adapter.forward(inputs, silent), whole(inputs.token_ids))
    with pytest.raises(CheckpointError, match="named 'bias'"):
        streamed_module(other, tmp_path, setup, name="other")


def models_own() -> nn.Module:
    torch.manual_seed(0)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, 8)
            self.head = nn.Linear(8, 32)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.head(self.embed(input_ids))  # type: ignore[no-any-return]

    return Own()


def test_what_cannot_stream_is_refused(folder_of: Callable[[str], Path]) -> None:
    """Another word than 0 or 1, and compiled layers (which keep their weights), are usage errors."""
    from harness.adapters.hf import hf_adapter

    folder = folder_of("llama")
    for options in ({"stream": "yes"}, {"stream": "1", "compile": "aot_eager"}):
        with pytest.raises(SpecError, match="stream"):
            hf_adapter(folder, Setup(side="accel", role="accel", adapter="x", options=options))


def test_what_does_not_fit_is_streamed_unasked(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a load would take more than the free memory, weights are streamed, and the log says why."""
    from harness.adapters import hf

    setup = Setup(side="accel", role="accel", adapter="x")
    assert not isinstance(hf.hf_adapter(folder_of("llama"), setup), StreamedAdapter)
    monkeypatch.setattr(hf, "free_bytes", lambda: 1000)
    assert isinstance(hf.hf_adapter(folder_of("llama"), setup), StreamedAdapter)
    assert "are streamed" in capsys.readouterr().err
