"""The multi_card stage: exact collectives, one world of ranks under a watchdog, every rank against one card."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.cases import ModelInfo
from harness.metrics import collectives as exact
from harness.stages import StageContext, StageView, multi_card
from harness.types import Failure, Layout, Scope, Setup, Tap, Trace
from harness.world import RankJob, run_ranks

PORT = Path(__file__).with_name("ranked_port.py")
TP2, EP2, PP2, BOTH = Layout(tp=2), Layout(ep=2), Layout(pp=2), Layout(tp=2, ep=2)


def context(*layouts: Layout, replay: bool = True) -> StageContext:
    info = ModelInfo(path="", config={}, vocab_size=16, layers=2, max_length_tokens=64)
    scope = Scope(layouts=(Layout(), *layouts), replay=replay)
    return StageContext(
        info=info,
        scope=scope,
        capabilities=frozenset({"multi_card"}),
        reference_capabilities=frozenset(),
        profile="quick",
        dtype="float32",
    )


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Results by run id of one campaign: tp2 is right, the other layouts each go wrong in a way of their own."""
    tmp_path = tmp_path_factory.mktemp("world")
    runs = [r for r in multi_card.plan(context(TP2, EP2, PP2, BOTH)) if r.kind != "simulate" and not r.level]
    options = {str(EP2): "segfault", str(PP2): "raise", str(BOTH): "hang"}
    results = run_ranks(
        [RankJob(run=r, out=tmp_path / "traces" / r.id) for r in runs],
        folder=tmp_path / "world",
        spec=f"{PORT}:factory",
        checkpoint=tmp_path,
        setup=Setup(side="accel", role="accel", adapter="ranked", dtype="float32", options=options),
        timeout_s=8,
    )
    assert list(results) == [r.id for r in runs]
    return results


def ranks_of(results, layout: Layout):
    return [results[f"multi_card/ranks-{layout}-r{rank}"] for rank in range(2)]


def traces_of(ctx: StageContext, *, spoil=None, checks=None) -> StageView:
    """Return a view in which every rank says what one card says, but for what `spoil(run, tensors)` changes."""
    setup = Setup(side="accel", role="accel", adapter="x", dtype="float32")
    draw = torch.Generator().manual_seed(0)
    exactly = {name: torch.randn(1, 19, 32, generator=draw) for name in ("embed", "layers.0", "layers.1", "logits")}
    taps = {
        n: Tap(name=n, kind="logits" if n == "logits" else "hidden", dims=("batch", "token", "feature"))
        for n in exactly
    }
    good = [{"operation": o, "dtype": "float32", "count": 7, "wrong": 0, "elements": 7} for o in exact.OPERATIONS]

    def trace(role: str, run_id: str):
        run = next(r for r in runs if r.id == run_id)
        if run.kind == "collectives":
            facts = {"checks": good if checks is None else checks(run, good), "unsupported": {}}
            return Trace(setup=setup, run=run, taps={}, tensors={}, facts=facts)
        noise = torch.Generator().manual_seed({"oracle": 0, "accel": 1}.get(role, 2))
        scale = 0.0 if role == "oracle" else 1e-6
        tensors = {n: t + scale * torch.randn(t.shape, generator=noise) for n, t in exactly.items()}
        if role == "accel" and spoil is not None:
            tensors = spoil(run, tensors)
        if isinstance(tensors, Failure):
            return tensors
        return Trace(setup=setup, run=run, taps=taps, tensors=tensors, facts={"token_ids": [1, 2]})

    runs = multi_card.plan(ctx)
    return StageView(context=ctx, runs=runs, trace=trace)


def values(found, metric: str, **where):
    return [m for m in found if m.metric == metric and all(m.where.get(k) == v for k, v in where.items())]


def test_contributions_tell_ranks_apart_and_sum_exactly():
    """In worlds of up to 16 ranks no two contributions are equal, and every sum is exact in bfloat16."""
    for size in (2, 3, 8, 16):
        for count in exact.COUNTS:
            all_of = [exact.contribution(rank=r, count=count, dtype=torch.bfloat16, world=size) for r in range(size)]
            assert len({tuple(t.tolist()) for t in all_of}) == size
            total = sum(t.to(torch.int64) for t in all_of)
            wanted = exact.expected("all_reduce", rank=0, count=count, dtype=torch.bfloat16, world=size)
            assert exact.wrong_elements(actual=wanted.to(torch.int64), expected=total) == 0


@pytest.mark.parametrize("operation", exact.OPERATIONS)
def test_an_answer_of_another_rank_is_wrong(operation):
    """What rank 0 must hold differs from what a rank left out of the collective holds."""
    kw = {"count": 7, "dtype": torch.float32, "world": 2}
    alone = exact.contribution(rank=0, **kw)
    wanted = exact.expected(operation, rank=0, **kw)
    assert exact.wrong_elements(actual=alone, expected=wanted) > 0
    assert exact.wrong_elements(actual=wanted.clone(), expected=wanted) == 0
    assert exact.wrong_elements(actual=torch.full_like(wanted, torch.nan), expected=wanted) == wanted.numel()


def test_shards_are_merged_only_where_they_add_up():
    """Uneven pieces along one axis give the whole; pieces that overlap or fall short give None."""
    whole = torch.arange(30.0).reshape(1, 3, 10)
    assert torch.equal(exact.merge_shards([whole[..., :7], whole[..., 7:]], shape=whole.shape), whole)
    assert exact.merge_shards([whole[..., :7], whole[..., 6:]], shape=whole.shape) is None
    assert exact.merge_shards([whole, whole], shape=whole.shape) is None


def test_plan_has_every_rank_of_every_layout():
    """Each claimed layout is simulated and run on each of its ranks; collectives run on every rank of the world."""
    runs = multi_card.plan(context(TP2, Layout(tp=2, pp=2)))
    ids = [r.id for r in runs]
    assert [r.options["rank"] for r in runs if r.kind == "collectives"] == [0, 1, 2, 3]
    assert {"multi_card/ranks-tp2-r1", "multi_card/ranks-tp2xpp2-r3-L1", "multi_card/simulated-tp2-L3"} <= set(ids)
    assert len(ids) == len(set(ids))
    assert all(r.pin in ids for r in runs if r.level)


def test_real_world_gives_exact_collectives(world):
    """Two gloo ranks answer every collective exactly, in every dtype and size."""
    for rank in range(2):
        facts = world[f"multi_card/collectives-r{rank}"].facts
        assert len(facts["checks"]) == len(exact.OPERATIONS) * len(exact.DTYPES) * len(exact.COUNTS)
        assert not facts["unsupported"]
        assert all(c["wrong"] == 0 for c in facts["checks"])


def test_real_ranks_leave_equal_traces(world):
    """Both ranks of a layout record every tap and generate the same tokens."""
    first, second = ranks_of(world, TP2)
    assert list(first.tensors) == ["inputs.token_ids", "embed", "layers.0", "layers.1", "logits"]
    assert all(torch.equal(first.tensors[n], second.tensors[n]) for n in first.tensors)
    assert len(first.facts["token_ids"]) == 4
    assert first.facts["token_ids"] == second.facts["token_ids"]


def test_a_rank_that_segfaults_is_named(world):
    """The rank, the signal, its last tap and its stack are known; its peer is not blamed."""
    peer, culprit = ranks_of(world, EP2)
    assert (culprit.kind, culprit.last_tap) == ("crash", "layers.0")
    assert "rank 1 of layout ep2 ended with SIGSEGV" in culprit.message
    assert "_misbehave" in culprit.stack
    assert peer.kind == "refused"
    assert "rank 1 ended with SIGSEGV at 'layers.0'" in peer.message


def test_a_rank_that_raises_leaves_its_own_words(world):
    """A layout after a crashed one is still run; an exception is that rank's failure, and its peer is not blamed."""
    peer, culprit = ranks_of(world, PP2)
    assert culprit.kind == "raised"
    assert "cannot be cut in 2" in culprit.message
    assert peer.kind == "refused"
    assert "rank 1 raised at 'layers.0'" in peer.message


def test_a_hung_rank_is_stopped_and_named(world):
    """A world without a sign of life is stopped, and the failure says which rank is behind, where, with its stack."""
    peer, culprit = ranks_of(world, BOTH)
    assert (culprit.kind, culprit.last_tap) == ("hang", "layers.0")
    assert "rank 1, last seen at 'layers.0'" in culprit.message
    assert "_misbehave" in culprit.stack
    assert peer.kind == "hang"


def test_equal_ranks_measure_clean():
    """Ranks that agree with each other and are as far from the oracle as the floor raise nothing."""
    found = multi_card.measure(traces_of(context(TP2)))
    assert not [m for m in found if m.problem]
    assert values(found, "rank_missing")
    assert all(m.value == 0 for m in values(found, "rank_missing"))
    assert values(found, "rank_disagreements")
    assert all(m.value == 0 for m in values(found, "rank_disagreements"))
    ratios = values(found, "error_ratio", slice="whole", split="ranks")
    assert {m.where["rank"] for m in ratios} == {0, 1}
    assert all(m.value < 1.13 for m in ratios)


def test_a_rank_that_drifts_is_found_at_its_first_tap():
    """A replicated value that differs on one rank by one element counts there, at its place in execution order."""

    def spoil(run, tensors):
        if run.options.get("rank") == 1 and run.kind == "ranks":
            tensors["layers.0"] = tensors["layers.0"].clone()
            tensors["layers.0"][0, 3, 5] += 1e-3
        return tensors

    found = multi_card.measure(traces_of(context(TP2), spoil=spoil))
    wrong = [m for m in values(found, "rank_disagreements") if m.value]
    assert {(m.subject, m.value, m.where["rank"]) for m in wrong} == {("layers.0", 1, 1)}


def test_nan_on_both_ranks_is_no_disagreement_but_a_failure():
    """The same NaN on all ranks agrees with itself; the error ratio is NaN, which no limit passes."""

    def spoil(run, tensors):
        if run.kind == "ranks":
            tensors["layers.1"] = tensors["layers.1"] * torch.nan
        return tensors

    found = multi_card.measure(traces_of(context(TP2), spoil=spoil))
    assert all(m.value == 0 for m in values(found, "rank_disagreements"))
    ratio = [m for m in values(found, "error_ratio", slice="whole", split="ranks") if m.subject == "layers.1"]
    assert ratio
    assert all(m.value != m.value for m in ratio)


def test_parts_of_a_tensor_are_put_together():
    """A tap that each rank records in part is compared whole, and swapped parts are a wrong value."""

    def shard(swap):
        def spoil(run, tensors):
            if run.kind == "ranks":
                halves = tensors["layers.1"].split([20, 12], dim=-1)
                rank = run.options["rank"]
                tensors["layers.1"] = halves[rank].flip(-1) if swap else halves[rank]
            return tensors

        return spoil

    for swap in (False, True):
        found = multi_card.measure(traces_of(context(TP2), spoil=shard(swap)))
        ratio = [m for m in values(found, "error_ratio", slice="whole", split="ranks") if m.subject == "layers.1"]
        assert ratio
        assert all((m.value > 100) is swap for m in ratio)


def test_a_tap_that_one_rank_leaves_out_is_missing():
    """Without pipeline stages every rank owes every layer; with them, the ranks together do."""

    def forget(run, tensors):
        return {n: t for n, t in tensors.items() if not (run.options.get("rank") == 1 and n == "layers.1")}

    for layout, count in ((TP2, 1), (PP2, 0)):
        found = multi_card.measure(traces_of(context(layout), spoil=forget))
        assert all(m.value == count for m in values(found, "rank_missing"))
        assert bool([m for m in found if m.problem == "missing"]) is bool(count)


def test_wrong_collectives_block_the_ranks_but_not_the_simulated_splits():
    """After one wrong element everything measured on ranks counts as not measured, with the collective as reason."""

    def broken(run, good):
        return [dict(c, wrong=2, first=3) if c["operation"] == "all_to_all" else c for c in good]

    found = multi_card.measure(traces_of(context(TP2), checks=broken))
    assert [m.value for m in values(found, "collective_wrong_elements") if m.value] == [2, 2]
    ranks = [m for m in found if m.where.get("split") == "ranks"]
    assert ranks
    assert all(m.problem for m in ranks)
    assert all("all_to_all" in m.detail["message"] for m in ranks)
    assert not [m for m in found if m.where.get("split") == "simulate" and m.problem]


def test_a_lost_rank_is_measured_as_an_error():
    """A rank that crashed is an error for every number promised of it, and the ranks cannot agree without it."""

    def crash(run, tensors):
        if run.kind == "ranks" and run.options["rank"] == 1:
            return Failure(run=run.id, kind="crash", message="rank 1 ended with SIGSEGV", last_tap="layers.0")
        return tensors

    found = multi_card.measure(traces_of(context(TP2), spoil=crash))
    for metric in ("rank_disagreements", "rank_missing", "error_ratio", "accumulated_ratio"):
        lost = [m for m in values(found, metric) if m.problem == "error"]
        assert lost
        assert all("SIGSEGV" in m.detail["message"] for m in lost)
