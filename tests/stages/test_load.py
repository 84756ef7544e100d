"""Faults of loading, each through facts, measurements and the shipped limits; and the differences that are none."""

from __future__ import annotations

import dataclasses
import json
import shutil
from datetime import date
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from harness.adapter import Weight
from harness.cases import ModelInfo
from harness.checklist import load_checklists
from harness.checkpoint import audit_facts, checkpoint_facts, decode, logical_tensors, open_checkpoint
from harness.checkpoint.scan import content_facts
from harness.diagnose import diagnose
from harness.gate import judge, stage_status
from harness.stages import StageContext, StageView, load
from harness.stages.tables import tables_of
from harness.types import Failure, Scope, Setup, Status, Trace

HIDDEN, VOCAB, EXPERTS = 24, 31, 5
CRITERION = next(c for c in load_checklists().by_stage["load"] if c.metric == "nonfinite_weights")
CONFIG = {
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
    "quantization_config": {"weight_block_size": [16, 16]},
}


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, 32, bias=True)
        self.k_proj = nn.Linear(HIDDEN, 16, bias=False)
        self.o_proj = nn.Linear(32, HIDDEN, bias=False)


class Layer(nn.Module):
    """A layer with separate attention and experts that are fused as [E, 2I, H], gate first."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.attn = Attention()
        self.experts = nn.ParameterDict(
            {
                "gate_up_proj": nn.Parameter(torch.zeros(EXPERTS, 40, HIDDEN)),
                "down_proj": nn.Parameter(torch.zeros(EXPERTS, HIDDEN, 20)),
            }
        )


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)


def stored() -> dict[str, torch.Tensor]:
    """The checkpoint: bf16, o_proj in block FP8, the experts' down_proj in MXFP4-like bytes of one packed row each."""
    tensors: dict[str, torch.Tensor] = {}
    seed = 0
    for name, value in Model().state_dict().items():
        if "experts" not in name:
            seed += 1
            tensors[name] = (randn(*value.shape, seed=seed) + (1.0 if "norm" in name else 0.0)).to(torch.bfloat16)
    for layer in range(2):
        prefix = f"layers.{layer}."
        o = tensors.pop(prefix + "attn.o_proj.weight")
        tensors[prefix + "attn.o_proj.weight"] = o.to(torch.float8_e4m3fn)
        tensors[prefix + "attn.o_proj.weight_scale_inv"] = randn(2, 2, seed=90 + layer).abs() + 0.1
        for e in range(EXPERTS):
            for i, part in enumerate(("gate_proj", "up_proj")):
                name = f"{prefix}experts.{e}.{part}.weight"
                tensors[name] = randn(20, HIDDEN, seed=100 + 10 * layer + e + 1000 * i).to(torch.bfloat16)
            codes = torch.randint(
                0, 256, (HIDDEN, 10), generator=torch.Generator().manual_seed(e + 50 * layer), dtype=torch.uint8
            )
            tensors[f"{prefix}experts.{e}.down_proj.weight_packed"] = codes
            tensors[f"{prefix}experts.{e}.down_proj.weight_scale"] = (
                torch.arange(HIDDEN, dtype=torch.uint8).reshape(HIDDEN, 1) % 9 + 119
            )
    return tensors


def write(folder: Path, tensors: dict[str, torch.Tensor], config=CONFIG) -> Path:
    folder.mkdir(parents=True)
    names = sorted(tensors)
    parts = [names[::2], names[1::2]]
    weight_map = {}
    for i, part in enumerate(parts):
        file = f"model-{i}.safetensors"
        save_file({n: tensors[n].contiguous() for n in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def loaded(folder: Path, dtype: torch.dtype, *, strict: bool = True) -> dict[str, torch.Tensor]:
    """Load as an honest port does, and return what memory holds. Not strict: skip what is not there, as many do."""
    torch.manual_seed(5 if dtype is torch.bfloat16 else 6)
    state = {n: torch.randn_like(v).to(dtype) for n, v in Model().state_dict().items()}
    checkpoint = open_checkpoint(folder)
    values = {x.name: decode(checkpoint, x).to(dtype) for x in logical_tensors(checkpoint)}
    for name in state:
        if name in values:
            state[name] = values[name]
        elif "experts" in name:
            prefix, kind = name.rsplit(".", 1)
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            wanted = [[f"{prefix}.{e}.{p}.weight" for p in parts] for e in range(EXPERTS)]
            if strict or all(n in values for row in wanted for n in row):
                state[name] = torch.stack([torch.cat([values[n] for n in row]) for row in wanted])
        elif strict:
            raise KeyError(name)
    return state


def traces(folder, actual, expected, *, claims=None, lossy=(), peak=1 << 20):
    claims = claims or {}

    def weights(state):
        return (
            Weight(name=n, tensor=t, checkpoint=claims.get(n, ""), lossless=n not in lossy) for n, t in state.items()
        )

    plan = load.plan(context())
    facts = {
        ("accel", load.LOAD): {"load_s": 1.0, "peak_bytes": peak, "checkpoint": checkpoint_facts(folder)},
        ("accel", load.CONTENT): content_facts(open_checkpoint(folder)),
        ("accel", load.WEIGHTS): {"audit": audit_facts(folder, weights(actual), "bfloat16")},
    }
    if expected is not None:
        facts["oracle", load.WEIGHTS] = {"audit": audit_facts(folder, weights(expected), "float32")}
    facts = json.loads(json.dumps([[*k, v] for k, v in facts.items()], allow_nan=False))
    setup = {
        r: Setup(side="s", role=r, adapter="a", dtype=d) for r, d in (("accel", "bfloat16"), ("oracle", "float32"))
    }
    return {
        (role, run.id): Trace(setup=setup[role], run=run, taps={}, tensors={}, facts=f)
        for role, id, f in facts
        for run in plan
        if run.id == id
    }


def context(**changes):
    info = ModelInfo(path="", config=CONFIG, vocab_size=VOCAB, layers=2, max_length_tokens=64)
    given = {"capabilities": frozenset({"weights"}), "reference_capabilities": frozenset({"weights"}), **changes}
    return StageContext(info=info, scope=Scope(), profile="quick", dtype="bfloat16", **given)


def judged(found, ctx=None):
    """Return the stage's status and the ids of the blocking criteria that are not passed, with their worst subjects."""
    ctx = ctx or context()
    view = StageView(context=ctx, runs=load.plan(ctx), trace=lambda role, run: found.get((role, run)))
    verdicts, unjudged = judge(
        criteria=load_checklists().by_stage["load"],
        measurements=load.measure(view),
        in_scope=lambda word: "" if word in ctx.capabilities else f"no {word}",
        today=date(2026, 1, 1),
    )
    assert unjudged == []
    bad = [v for v in verdicts if v.status not in (Status.PASSED, Status.SKIPPED)]
    subjects = {v.criterion.id: v.worst.subject for v in bad if v.worst is not None}
    return stage_status(verdicts)[0], {v.criterion.id for v in bad if v.criterion.blocking}, subjects


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("load") / "checkpoint", stored())


@pytest.fixture
def actual(folder):
    return loaded(folder, torch.bfloat16)


@pytest.fixture
def expected(folder):
    return loaded(folder, torch.float32)


def test_an_honest_load_is_accepted(folder, actual, expected):
    """A bf16 port with fused experts against a float32 reference of the same names passes everything."""
    assert judged(traces(folder, actual, expected)) == (Status.PASSED, set(), {})


def test_a_port_of_other_names_and_layouts_is_accepted(folder, actual, expected):
    """Renamed, transposed, fused and per-expert weights pass; orders that nobody vouches for are named."""
    mine = {}
    for name, value in actual.items():
        key = name.replace("layers.", "blk_").replace(".", "/")
        mine[key] = value.transpose(-1, -2).contiguous() if name.endswith("gate_up_proj") else value
    q, k = "layers.0.attn.q_proj.weight", "layers.0.attn.k_proj.weight"
    for name in (q, k):
        del mine[name.replace("layers.", "blk_").replace(".", "/")]
    mine["blk_0/attn/qk"] = torch.cat((actual[q], actual[k]))
    status, bad, subjects = judged(traces(folder, mine, expected))
    assert (status, bad) == (Status.PASSED, set())
    assert "load.unchecked_order" in subjects


def test_a_tied_head_that_is_absent_from_the_file_is_accepted(tmp_path):
    """Twin of LD01: no head in the file, tied in the configuration, and memory holds the embedding there."""
    tensors = {n: t for n, t in stored().items() if n != "lm_head.weight"}
    folder = write(tmp_path / "c", tensors, {**CONFIG, "tie_word_embeddings": True})
    sides = [loaded(folder, d, strict=False) for d in (torch.bfloat16, torch.float32)]
    for state in sides:
        state["lm_head.weight"] = state["embed_tokens.weight"]
    assert judged(traces(folder, *sides))[0] is Status.PASSED
    for state in sides:
        del state["lm_head.weight"]  # a module that shares the parameter yields it once
    assert judged(traces(folder, *sides))[0] is Status.PASSED


def test_ld01_head_without_a_source(tmp_path):
    """LD01: the head is neither in the file nor tied; it is named, on one side or on both."""
    tensors = {n: t for n, t in stored().items() if n != "lm_head.weight"}
    folder = write(tmp_path / "c", tensors, {**CONFIG, "tie_word_embeddings": True})
    actual, expected = (loaded(folder, d, strict=False) for d in (torch.bfloat16, torch.float32))
    for reference in (expected, {**expected, "lm_head.weight": expected["embed_tokens.weight"]}):
        status, bad, subjects = judged(traces(folder, actual, reference))
        assert status is Status.FAILED
        assert bad == {"load.unfilled", "load.tied"}
        assert subjects["load.unfilled"] == "lm_head.weight"


def test_ld03_missing_shard(tmp_path):
    """LD03: a shard that the index names is gone; the loader takes what exists."""
    folder = write(tmp_path / "c", stored())
    names = list(open_checkpoint(folder).headers["model-1.safetensors"].tensors)
    (folder / "model-1.safetensors").unlink()
    sides = [loaded_anyway(folder, d) for d in (torch.bfloat16, torch.float32)]
    found = traces(folder, *sides)
    status, bad, _ = judged(found)
    assert status is Status.FAILED
    assert {"load.index", "load.unfilled"} <= bad
    problems = found["accel", load.LOAD].facts["checkpoint"]["problems"]
    assert {p["name"] for p in problems} >= set(names)


def loaded_anyway(folder, dtype):
    """Load what can be decoded, leave the rest as it was made."""
    torch.manual_seed(dtype.itemsize)
    state = {n: torch.randn_like(v).to(dtype) for n, v in Model().state_dict().items()}
    checkpoint = open_checkpoint(folder)
    for logical in logical_tensors(checkpoint):
        if not logical.problem and logical.name in state:
            state[logical.name] = decode(checkpoint, logical).to(dtype)
    return state


def test_ld04_truncated_shard(tmp_path):
    """LD04: the tail of a shard is missing and reads as zeros."""
    folder = write(tmp_path / "c", stored())
    actual, expected = (loaded(folder, d) for d in (torch.bfloat16, torch.float32))
    path = folder / "model-1.safetensors"
    last = max(open_checkpoint(folder).headers[path.name].tensors.values(), key=lambda r: r.end)
    path.write_bytes(path.read_bytes()[:-40])
    status, bad, subjects = judged(traces(folder, actual, expected))
    assert status is Status.FAILED
    assert "load.index" in bad
    assert subjects["load.index"] == last.name


def test_ld07_initialised_again(folder, actual, expected):
    """LD07: a module is initialised again after its tensors were loaded, on one side or alike on both."""
    name = "layers.1.attn.k_proj.weight"
    actual[name] = randn(16, HIDDEN, seed=3).to(torch.bfloat16)
    status, bad, subjects = judged(traces(folder, actual, expected))
    assert (status, subjects["load.values"]) == (Status.FAILED, name)
    expected[name] = randn(16, HIDDEN, seed=4)
    assert judged(traces(folder, actual, expected))[2]["load.values"] == name
    assert bad == {"load.values"}


@pytest.mark.parametrize("what", ["layers.1.", "layers.1.norm."])
def test_ld09_renamed_keys(tmp_path, what):
    """LD09: the keys of a layer, or of one norm, have a prefix that the loader skips: unused there, unfilled here."""
    tensors = stored()
    for name in [n for n in tensors if n.startswith(what) and "experts" not in n and "o_proj" not in n]:
        tensors["old/" + name.replace(".", "/")] = tensors.pop(name)
    folder = write(tmp_path / "c", tensors)
    actual, expected = (loaded(folder, d, strict=False) for d in (torch.bfloat16, torch.float32))
    for state in (actual, expected):
        state["layers.1.norm.weight"] = torch.ones_like(state["layers.1.norm.weight"])  # as norms are made
    status, bad, subjects = judged(traces(folder, actual, expected))
    assert status is Status.FAILED
    assert bad == {"load.unused", "load.unfilled"}
    assert subjects["load.unfilled"].startswith("layers.1.")


@pytest.mark.parametrize("how", ["byte as a number", "no bias"])
def test_ld11_scale_bytes(folder, actual, expected, how):
    """LD11: the scale bytes of MXFP4 are read as numbers, or as 2^s."""
    checkpoint, name = open_checkpoint(folder), "layers.0.experts.down_proj"
    rows = []
    for e in range(EXPERTS):
        prefix = f"layers.0.experts.{e}.down_proj.weight"
        scale = checkpoint.read(prefix + "_scale").float()
        right = torch.pow(2.0, scale - 127)
        value = decode(checkpoint, next(x for x in logical_tensors(checkpoint) if x.name == prefix)) / right
        rows.append(value * (scale if how == "byte as a number" else torch.pow(2.0, scale)))
    actual[name] = torch.stack(rows).to(torch.bfloat16)
    status, bad, subjects = judged(traces(folder, actual, expected))
    assert status is Status.FAILED
    assert bad & {"load.values", "load.unfilled"}
    assert name in subjects.values()


def test_ld17_half_the_scale(folder, actual, expected):
    """LD17: FP8 scales of one layer are halved, as for another dialect of FP8; doubled back they are accepted."""
    name = "layers.1.attn.o_proj.weight"
    actual[name] = actual[name] / 2
    status, bad, subjects = judged(traces(folder, actual, expected))
    assert (status, bad, subjects["load.values"]) == (Status.FAILED, {"load.values"}, name)
    actual[name] = actual[name] * 2
    assert judged(traces(folder, actual, expected))[0] is Status.PASSED


def test_ld17_nan_for_zero(folder, actual, expected):
    """LD17: a zero of one dialect is a NaN of the other."""
    name = "layers.0.attn.o_proj.weight"
    actual[name] = actual[name].clone()
    actual[name][3, 4] = float("nan")
    status, bad, subjects = judged(traces(folder, actual, expected))
    assert (status, bad) == (Status.FAILED, {"load.values", "load.finite"})
    assert subjects["load.finite"] == name


def test_what_is_no_number_in_the_file_is_the_files(tmp_path):
    """A reserved scale byte gives NaN in memory too: the finding says that the file holds it, not that a loader did."""
    tensors = stored()
    tensors["layers.1.experts.2.down_proj.weight_scale"][3, 0] = 255
    folder = write(tmp_path / "reserved", tensors)
    found = traces(folder, loaded(folder, torch.bfloat16), loaded(folder, torch.float32))
    ctx = context()
    view = StageView(context=ctx, runs=load.plan(ctx), trace=lambda role, run: found.get((role, run)))
    (told,) = [m for m in load.measure(view) if m.metric == "nonfinite_weights"]
    assert told.subject == "layers.1.experts.down_proj"
    (finding,) = diagnose([(CRITERION, told)], lambda role, run: None, floors=(), modules={}, reproduce="")
    assert "the checkpoint's own bytes" in finding.cause
    assert {"load.finite", "load.content"} <= judged(found)[1]


GATE_UP = {
    "interleaved for concatenated": lambda g, u: torch.stack((g, u), 1).flatten(0, 1),
    "up before gate": lambda g, u: torch.cat((u, g)),
}


@pytest.mark.parametrize("how", GATE_UP)
def test_ld22_gate_and_up(folder, actual, expected, how):
    """LD22: gate and up are interleaved where the module wants halves, or exchanged."""
    name = "layers.1.experts.gate_up_proj"
    actual[name] = torch.stack([GATE_UP[how](*w.chunk(2)) for w in actual[name]])
    status, bad, subjects = judged(traces(folder, actual, expected))
    assert (status, bad, subjects["load.order"]) == (Status.FAILED, {"load.order"}, name)


def test_one_layer_put_together_otherwise_than_its_peers(tmp_path):
    """Without a reference of the same names, gate and up exchanged in one of three layers is still found."""
    names = [(n, e, p) for n in range(3) for e in range(2) for p in ("gate", "up")]
    tensors = {f"layers.{n}.experts.{e}.{p}.w": randn(6, 8, seed=9 * n + 3 * e + len(p)) for n, e, p in names}
    folder = write(tmp_path / "c", tensors, {})

    def fused(n, first, second):
        return torch.cat([tensors[f"layers.{n}.experts.{e}.{p}.w"] for e in range(2) for p in (first, second)])

    held = {f"block{n}.w13": fused(n, "gate", "up") for n in range(3)}
    assert judged(traces(folder, held, tensors))[:2] == (Status.PASSED, set())
    status, bad, subjects = judged(traces(folder, {**held, "block1.w13": fused(1, "up", "gate")}, tensors))
    assert (status, bad, subjects["load.order"]) == (Status.FAILED, {"load.order"}, "block1.w13")


def test_a_damaged_expert_inside_a_stack_is_told_by_its_values(folder, actual, expected):
    """An expert scaled by 1 %, or with one wrong row, is a mismatch of its stack and not a tensor nobody loaded."""
    name = "layers.1.experts.down_proj"
    for wrong in (slice(None), 3):
        damaged = actual[name].clone()
        damaged[2, wrong] *= 1.01
        status, bad, subjects = judged(traces(folder, {**actual, name: damaged}, expected))
        assert (status, bad, subjects["load.values"]) == (Status.FAILED, {"load.values"}, name)


@pytest.mark.parametrize("reference", [True, False])
def test_ld23_rotary_rows(folder, actual, expected, reference):
    """LD23: the rows of q are permuted from one rotary style to the other; no reference is needed to see it."""
    name = "layers.0.attn.q_proj.weight"
    actual[name] = actual[name].reshape(2, 8, 2, HIDDEN).transpose(1, 2).reshape(32, HIDDEN)
    status, bad, subjects = judged(traces(folder, actual, expected if reference else None))
    assert (status, bad, subjects["load.order"]) == (Status.FAILED, {"load.order"}, name)


def test_rows_that_the_reference_permutes_too_are_accepted(folder, actual, expected):
    """Twin of LD23: a loader whose convention permutes the rows of q does so on both sides."""
    name = "layers.0.attn.q_proj.weight"
    for state in (actual, expected):
        state[name] = state[name].reshape(2, 8, 2, HIDDEN).transpose(1, 2).reshape(32, HIDDEN)
    assert judged(traces(folder, actual, expected))[0] is Status.PASSED


@pytest.mark.parametrize("own_names", [False, True])
def test_permuted_experts(folder, actual, expected, own_names):
    """Experts at other places than their numbers are found, also under names that the reference does not have."""
    name = "layers.0.experts.down_proj"
    actual[name] = actual[name][[0, 2, 1, 3, 4]]
    if own_names:
        actual["mine"] = actual.pop(name)
    status, bad, _ = judged(traces(folder, actual, expected))
    assert (status, bad) == (Status.FAILED, {"load.order"})


def test_a_square_weight_held_transposed_is_found(tmp_path):
    """A square weight in the wrong orientation keeps its shape; the reference's orientation tells."""
    folder = write(tmp_path / "c", {"w": randn(6, 6, seed=1).to(torch.bfloat16), "v": randn(3, seed=2)}, {})
    expected = {"w": randn(6, 6, seed=1).to(torch.bfloat16).float(), "v": randn(3, seed=2)}
    actual = {"w": expected["w"].t().to(torch.bfloat16), "v": randn(3, seed=2)}
    assert judged(traces(folder, actual, expected))[1] == {"load.order"}


def test_what_a_loader_computes_alike_on_both_sides_is_vouched_for(folder, actual, expected):
    """A value that a loader computes (a gain folded into k) is accepted where both sides hold it, and only there."""
    name = "layers.0.attn.k_proj.weight"
    folded = expected[name] * 3.7
    both = traces(folder, {**actual, name: folded.to(torch.bfloat16)}, {**expected, name: folded})
    assert judged(both)[0] is Status.PASSED
    one = traces(folder, {**actual, name: folded.to(torch.bfloat16)}, expected)
    assert judged(one)[1] == {"load.values"}


def test_a_declared_narrow_weight_is_judged_by_its_error(folder, actual, expected):
    """A weight declared narrower than the checkpoint passes near it, and fails at half of it."""
    name = "layers.0.attn.k_proj.weight"
    narrow = actual[name].to(torch.float8_e4m3fn).to(torch.bfloat16)
    assert judged(traces(folder, {**actual, name: narrow}, expected, lossy={name}))[0] is Status.PASSED
    assert judged(traces(folder, {**actual, name: narrow}, expected))[1] == {"load.values"}
    status, bad, _ = judged(traces(folder, {**actual, name: narrow / 2}, expected, lossy={name}))
    assert (status, bad) == (Status.FAILED, {"load.lossy"})


def test_half_precision_of_float32_is_no_excuse(tmp_path):
    """A bf16 copy of a float32 checkpoint is compared after rounding, whatever it declares: 1 % off is a mismatch."""
    folder = write(tmp_path / "c", {"w": randn(9, 7, seed=1)}, {})
    right = randn(9, 7, seed=1)
    assert judged(traces(folder, {"w": right.to(torch.bfloat16)}, None, lossy={"w"}))[0] is Status.PASSED
    wrong = (right * 1.01).to(torch.bfloat16)
    assert judged(traces(folder, {"w": wrong}, None, lossy={"w"}))[1] == {"load.values"}


def test_too_much_memory_is_found(folder, actual, expected):
    """A peak of twice the plan fails; the plan is made from headers and not by the port."""
    planned = checkpoint_facts(folder)["planned_bytes"]["bfloat16"]
    assert judged(traces(folder, actual, expected, peak=2 * planned))[1] == {"load.memory"}


@pytest.mark.parametrize(
    ("window", "peak", "bad"), [(0.25, 0.5, {"load.memory"}), (0.5, 0.5, set()), (9, 2, {"load.memory"})]
)
def test_a_streamed_side_is_held_to_its_window(folder, actual, expected, window, peak, bad):
    """A side that says its weights pass through a window has the plan of that window; it cannot loosen the headers'."""
    planned = checkpoint_facts(folder)["planned_bytes"]["bfloat16"]
    found = traces(folder, actual, expected, peak=int(peak * planned))
    streamed = {**found["accel", load.LOAD].facts, "window_bytes": int(window * planned)}
    found["accel", load.LOAD] = dataclasses.replace(found["accel", load.LOAD], facts=streamed)
    assert judged(found)[1] == bad


def test_a_load_that_did_not_end_is_an_error(folder, actual, expected, tmp_path):
    """A crash during the load is an ERROR of all that needs the port; the checkpoint's own headers are judged still."""
    found = traces(folder, actual, expected)
    for id in (load.LOAD, load.CONTENT, load.WEIGHTS):
        found["accel", id] = Failure(run=id, kind="crash", message="signal 11")
    copy = shutil.copytree(folder, tmp_path / "copy")
    there = dataclasses.replace(context(), info=dataclasses.replace(context().info, path=str(copy)))
    status, bad, _ = judged(found, there)
    assert status is Status.ERROR
    blocking = {c.id for c in load_checklists().by_stage["load"] if c.blocking and "converts" not in c.needs}
    assert bad == blocking - {"load.index", "load.decodable"}
    sorted(copy.glob("*.safetensors"))[0].unlink()
    status, bad, _ = judged(found, there)
    assert status is Status.FAILED
    assert "load.index" in bad


def test_a_port_that_cannot_show_its_weights_is_judged_on_the_rest(folder, actual, expected):
    """Without the capability no weights run is planned, and what needs it is out of scope."""
    blind = context(capabilities=frozenset())
    assert [r.id for r in load.plan(blind)] == [load.LOAD, load.CONTENT]
    found = traces(folder, actual, expected)
    assert judged(found, blind)[0] is Status.PASSED


def test_a_port_that_shows_no_weight_at_all_is_an_error(folder, expected):
    """Zero weights are not zero mismatches."""
    assert judged(traces(folder, {}, expected))[0] is Status.ERROR


def test_vision_weights_matter_only_where_images_are_claimed(tmp_path):
    """A text port may leave the vision tower in the file; one that claims images may not."""
    tensors = {"w": randn(3, 5, seed=1), "visual.blocks.0.fc.weight": randn(4, 5, seed=2)}
    folder = write(tmp_path / "c", tensors, {})
    found = traces(folder, {"w": tensors["w"]}, None)
    assert judged(found)[0] is Status.PASSED
    claimed = dataclasses.replace(context(), scope=Scope(image=True))
    assert judged(found, claimed)[1] == {"load.unused"}


def frequencies(base: float = 10000.0, size: int = 16) -> list[float]:
    """Rotary frequencies as float32 holds them."""
    return (base ** -(torch.arange(0, size, 2) / size)).float().tolist()


def tables(ours: list[float], theirs: list[float], **more: object) -> dict[str, list[tuple[str, float]]]:
    """Return (subject, value) by metric of the tables of two sides."""
    run = load.plan(StageContext(**{**CONTEXT, "capabilities": frozenset({"weights"})}))[1]
    found: dict[str, list[tuple[str, float]]] = {}
    for m in tables_of(run, {"tables": {"inv_freq": ours}}, {"tables": {"inv_freq": theirs}, **more}):
        found.setdefault(m.metric, []).append((m.subject, m.value or 0.0))
    return found


CONTEXT = {
    "info": ModelInfo(path="", config={}, vocab_size=VOCAB, layers=2, max_length_tokens=64),
    "scope": Scope(),
    "reference_capabilities": frozenset(),
    "profile": "quick",
    "dtype": "bfloat16",
}


def test_a_table_of_another_base_or_precision_is_a_mismatch():
    """Another base and a table rounded to bf16 are found by name; the same formula in other roundings is not."""
    right = frequencies()
    near = [x * (1 + 1e-7) for x in right]
    assert tables(near, right)["table_mismatches"] == [("all", 0.0)]
    assert tables(frequencies(500000.0), right)["table_mismatches"] == [("inv_freq", 1.0)]
    rounded = torch.tensor(right).bfloat16().tolist()
    assert tables(rounded, right)["table_mismatches"] == [("inv_freq", 1.0)]
    assert tables(right[:4], right)["table_mismatches"] == [("inv_freq", 1.0)]


def test_a_reference_that_was_rounded_or_not_filled_is_suspect():
    """A rounded table of the reference and a weight that it filled from nowhere are named; powers of two are not."""
    right = frequencies()
    rounded = torch.tensor(right).bfloat16().tolist()
    assert tables(right, right)["suspect_reference"] == [("all", 0.0)]
    assert tables(rounded, rounded)["suspect_reference"] == [("inv_freq", 1.0)]
    halves = [2.0**-i for i in range(8)]
    assert tables(halves, halves)["suspect_reference"] == [("all", 0.0)]
    found = tables(right, right, audit={"unfilled": ["model.gate.weight"]})
    assert found["suspect_reference"] == [("model.gate.weight", 1.0)]


def test_a_tie_that_the_checkpoint_does_not_have_is_named(folder, actual, expected):
    """Embedding and head are two tensors; a port that ties them holds the wrong one in the head, and is told so."""
    wrong = {**actual, "lm_head.weight": actual["embed_tokens.weight"].clone()}
    found = traces(folder, wrong, expected)
    view = StageView(context=context(), runs=load.plan(context()), trace=lambda role, run: found.get((role, run)))
    told = [m for m in load.measure(view) if m.metric == "provenance_mismatches" and m.value]
    assert [m.subject for m in told] == ["lm_head.weight"]
    assert "the output head and the embedding tied" in told[0].detail["message"]


def test_what_the_loader_itself_reports_is_shown_beside(folder, actual, expected):
    """A loader's own report is evidence: told beside a finding whether it names the same or not."""
    name = "layers.0.norm.weight"
    del actual[name]
    for reported, words in (([name], "reports it too"), ([], "does not report it")):
        found = traces(folder, actual, expected)
        trace = found["accel", load.LOAD]
        found["accel", load.LOAD] = dataclasses.replace(trace, facts={**trace.facts, "unused": reported})
        view = StageView(
            context=context(), runs=load.plan(context()), trace=lambda role, run, f=found: f.get((role, run))
        )
        (told,) = [m for m in load.measure(view) if m.metric == "unused_tensors" and m.value]
        assert words in told.detail["message"]
