"""Decisions: ties, flips, sets, and values only where decisions agree."""

import torch
from sides import EXPERTS, TOKENS, compare, hidden, noisy, normal, run_of, trace, value

from harness.compare.decisions import conditions, decisions_of
from harness.compare.subject import Scene

ROUTER = "layers.0.moe.router"
TOPK, SCORES = f"{ROUTER}.topk", f"{ROUTER}.topk.scores"


def routed() -> dict[str, torch.Tensor]:
    """Return an oracle with a router, experts behind it and a layer around them."""
    scores = normal(TOKENS, EXPERTS, seed=11)
    return {
        "layers.0.attn": hidden(1),
        SCORES: scores,
        TOPK: scores.topk(2).indices,
        "layers.0.moe.experts": hidden(2),
        "layers.0.moe": hidden(3),
        "layers.0": hidden(4),
    }


def flipped(oracle: dict[str, torch.Tensor], token: int, to: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return an honest accel whose choice for one token is another one."""
    accel = noisy(oracle, 9)
    accel[TOPK] = oracle[TOPK].clone()
    accel[TOPK][token] = to
    return accel


def test_order_within_a_set_is_no_flip() -> None:
    """The same experts in another order agree everywhere."""
    oracle = routed()
    accel = {**noisy(oracle, 9), TOPK: oracle[TOPK].flip(1)}
    found = compare(accel, oracle, run_of(2))
    assert value(found, "decision_margin_z").value == 0.0
    assert value(found, "agreeing_share").value == 1.0


def test_a_near_tie_may_flip_and_a_clear_choice_may_not() -> None:
    """Exchanging the second and third of nearly equal scores is inside the noise, the best for the worst is not."""
    oracle = routed()
    third = oracle[SCORES].topk(3).indices[7]
    oracle[SCORES][7, third[2]] = oracle[SCORES][7, third[1]] - 1e-3
    tie = compare(flipped(oracle, 7, third[[0, 2]]), oracle, run_of(2))
    assert 0 < value(tie, "decision_margin_z").value < 5
    worst = oracle[SCORES][7].argmin()
    clear = value(compare(flipped(oracle, 7, torch.stack([third[0], worst])), oracle, run_of(2)), "decision_margin_z")
    assert clear.value > 50
    assert clear.where["token"] == 7


def test_many_flips_are_counted_beyond_the_floors() -> None:
    """Flips that are each explicable exceed their number when there are many more than the floor's."""
    oracle = routed()
    order = oracle[SCORES].argsort(dim=-1, descending=True)
    few, many = noisy(oracle, 9), noisy(oracle, 9)
    few[TOPK], many[TOPK] = order[:, :2].clone(), order[:, [0, 2]]
    few[TOPK][:3, 1] = order[:3, 2]
    assert value(compare(few, oracle, run_of(2)), "decision_flips_excess").value <= 0
    assert value(compare(many, oracle, run_of(2)), "decision_flips_excess").value > 30


def test_a_set_of_another_size_is_counted() -> None:
    """A repeated expert makes a smaller set, k - 1 choices do so everywhere; both are size mismatches."""
    oracle = routed()
    accel = flipped(oracle, 5, oracle[TOPK][5, [0, 0]])
    assert value(compare(accel, oracle, run_of(2)), "decision_size_mismatches").value == 1
    fewer = {**noisy(oracle, 9), TOPK: oracle[TOPK][:, :1]}
    assert value(compare(fewer, oracle, run_of(2)), "decision_size_mismatches").value == TOKENS


def selecting() -> dict[str, torch.Tensor]:
    """Return an oracle that selects 4 of the keys so far; -1 pads the first rows."""
    future = torch.ones(TOKENS, TOKENS).triu(1).bool()
    scores = normal(TOKENS, TOKENS, seed=12).masked_fill(future, float("-inf"))
    chosen = scores.topk(4)
    ids = chosen.indices.masked_fill(chosen.values == float("-inf"), -1)
    return {
        "layers.0.attn.indexer.topk.scores": scores[None],
        "layers.0.attn.indexer.topk": ids[None],
        "layers.0.attn": hidden(5),
    }


DIMS = {"layers.0.attn.indexer.topk.scores": "batch token key"}


def test_padding_is_nothing_and_the_future_is_forbidden() -> None:
    """Padding may be any masked key that the port masks too; a future key that it scores is outside the valid set."""
    oracle, name = selecting(), "layers.0.attn.indexer.topk"
    accel = {k: v.clone() for k, v in noisy(oracle, 9).items()}
    accel[name] = oracle[name].clone()
    accel[name][0, 0, 1:] = torch.tensor([5, 6, 7])
    found = compare(accel, oracle, run_of(3), dims=DIMS)
    assert value(found, "decision_outside_valid").value == 0
    assert value(found, "decision_size_mismatches").value == 0
    accel[name][0, 9, 0] = 30
    accel[f"{name}.scores"][0, 9, 30] = 9.0
    assert value(compare(accel, oracle, run_of(3), dims=DIMS), "decision_outside_valid").value == 1


def test_an_id_that_does_not_exist_is_outside() -> None:
    """An index beyond the keys is counted, not skipped."""
    oracle, name = selecting(), "layers.0.attn.indexer.topk"
    accel = noisy(oracle, 9)
    accel[name] = oracle[name].clone()
    accel[name][0, 20, 0] = 999
    assert value(compare(accel, oracle, run_of(3), dims=DIMS), "decision_outside_valid").value == 1


def test_values_behind_a_flip_are_not_compared() -> None:
    """A token whose route flipped has other experts: it spoils no ratio behind the router unless routes are pinned."""
    oracle = routed()
    accel = flipped(oracle, 7, oracle[TOPK][7].add(1).remainder(EXPERTS))
    for name in ("layers.0.moe.experts", "layers.0.moe"):
        accel[name] = accel[name].clone()
        accel[name][0, 7] *= 3
    found = compare(accel, oracle, run_of(2))
    assert value(found, "error_ratio", "layers.0.moe", "token").value < 2
    pinned = compare(accel, oracle, run_of(3, pin_decisions=True))
    assert value(pinned, "error_ratio", "layers.0.moe.experts", "token").value > 10


def test_values_before_a_decision_or_behind_a_pinned_unit_do_not_depend_on_it() -> None:
    """A wrong attention is seen on every token although routes differ, and so is glue behind pinned parts."""
    oracle = routed()
    run = run_of(2)
    scene = Scene(
        stage="text", run=run, oracle=trace(oracle, run), floors=(), accel=trace(oracle, run), dtype="bfloat16",
        order={n: i for i, n in enumerate(oracle)},
    )  # fmt: skip
    decisions = decisions_of(scene)
    assert conditions(scene, "layers.0.attn", decisions) == []
    assert conditions(scene, "layers.0.moe", decisions) == [TOPK]
    assert conditions(scene, "layers.0", decisions) == []


def test_a_later_decision_is_judged_where_the_earlier_ones_agree() -> None:
    """Experts chosen within other groups are not held against the port; the wrong groups are."""
    oracle = routed()
    groups = normal(TOKENS, 4, seed=13)
    first = {f"{ROUTER}.topk.scores": groups, TOPK: groups.topk(2).indices}
    later = {f"{TOPK}.1.scores": oracle[SCORES], f"{TOPK}.1": oracle[SCORES].topk(2).indices}
    oracle = {**first, **later, "layers.0.moe": hidden(3)}
    accel = noisy(oracle, 9)
    accel[TOPK], accel[f"{TOPK}.1"] = oracle[TOPK].clone(), oracle[f"{TOPK}.1"].clone()
    accel[TOPK][7] = groups[7].argsort()[:2]
    accel[f"{TOPK}.1"][7] = oracle[SCORES][7].argsort()[:2]
    found = compare(accel, oracle, run_of(2))
    assert value(found, "decision_margin_z", TOPK).value > 50
    assert value(found, "decision_margin_z", f"{TOPK}.1").value == 0.0


def test_flips_without_scores_are_judged_by_their_number() -> None:
    """Without scores one flip is within what honest ports do, and says that it was not weighed; many are too many."""
    oracle = {k: v for k, v in routed().items() if k != SCORES}
    one = compare(flipped(oracle, 7, oracle[TOPK][7].add(1).remainder(EXPERTS)), oracle, run_of(2))
    assert value(one, "decision_margin_z").value == 0.0
    assert "no scores were recorded" in value(one, "decision_margin_z").detail["message"]
    assert value(one, "decision_flips_excess").value <= 0
    many = {**noisy(oracle, 9), TOPK: oracle[TOPK].add(1).remainder(EXPERTS)}
    assert value(compare(many, oracle, run_of(2)), "decision_flips_excess").value > 0


def test_a_choice_that_is_changed_on_its_way_is_weighed_by_the_scores_before_it() -> None:
    """What the experts are told is a decision of its own; it is held to the router's scores."""
    oracle = routed()
    told = "layers.0.moe.experts.in.top_k_index"
    oracle = {SCORES: oracle[SCORES], TOPK: oracle[TOPK], told: oracle[TOPK].clone(), "layers.0.moe": hidden(3)}
    accel = noisy(oracle, 9)
    accel[TOPK], accel[told] = oracle[TOPK].clone(), oracle[told].clone()
    accel[told][7] = oracle[SCORES][7].argsort()[:2]
    found = compare(accel, oracle, run_of(2))
    assert value(found, "decision_margin_z", TOPK).value == 0
    assert value(found, "decision_margin_z", told).value > 50


def test_a_port_that_hides_its_choices_is_missing_them() -> None:
    """A decision that the port does not record is a problem in every run."""
    oracle = routed()
    accel = {k: v for k, v in noisy(oracle, 9).items() if k != TOPK}
    assert value(compare(accel, oracle, run_of(2)), "decision_margin_z").problem == "missing"


def test_disagreement_of_one_port_is_too_few_but_that_of_the_floor_says_nothing() -> None:
    """Too few agreeing tokens are a problem where honest runs agree; where those do not either, there is no number."""
    oracle = routed()
    wrong = flipped(oracle, 0, oracle[TOPK][0])
    wrong[TOPK] = oracle[TOPK].add(1).remainder(EXPERTS)
    found = compare(wrong, oracle, run_of(2))
    assert value(found, "error_ratio", "layers.0.moe").problem == "too_few"
    tied = routed()
    tied[SCORES] = 1 + 1e-6 * tied[SCORES]
    tied[TOPK] = tied[SCORES].topk(2).indices
    assert not [m for m in compare(noisy(tied, 9), tied, run_of(2)) if m.subject == "layers.0.moe"]


def test_routing_weights_are_compared_by_what_they_belong_to() -> None:
    """Weights in another order are right where the choices come in the same order, and wrong where they do not."""
    oracle = routed()
    told, weights = "layers.0.moe.experts.in.top_k_index", "layers.0.moe.router.out.1"
    values = oracle[SCORES].gather(-1, oracle[TOPK])
    oracle = {SCORES: oracle[SCORES], TOPK: oracle[TOPK], weights: values, told: oracle[TOPK].clone()}
    dims = {weights: "token choice"}
    accel = noisy(oracle, 9)
    accel[TOPK], accel[told] = oracle[TOPK], oracle[told].flip(-1)
    turned = {**accel, weights: accel[weights].flip(-1)}
    run = run_of(3, pin_decisions=True)
    assert value(compare(turned, oracle, run, dims=dims), "error_ratio", weights, "whole").value < 1.5
    assert value(compare(accel, oracle, run, dims=dims), "error_ratio", weights, "whole").value > 10


def test_a_factor_that_is_undone_beside_it_is_no_error() -> None:
    """A factor at the router and its inverse at the experts cancel; a factor alone does not, nor do unlike ones."""
    weights, experts = "layers.0.moe.router.out.1", "layers.0.moe.experts"
    oracle = {weights: normal(TOKENS, 16, seed=3).abs(), experts: hidden(4), "layers.0.moe": hidden(5)}

    def ratios(router: float, sum_of: float) -> dict[str, float]:
        accel = noisy(oracle, 9)
        accel[weights], accel[experts] = accel[weights] * router, accel[experts] * sum_of
        found = compare(accel, oracle, run_of(3), dims={weights: "token choice"})
        return {t: value(found, "error_ratio", t, "whole").value or 0.0 for t in (weights, experts)}

    assert max(ratios(0.4, 2.5).values()) < 1.5
    assert ratios(0.4, 1.0)[weights] > 50
    assert min(ratios(0.4, 2.0).values()) > 50
