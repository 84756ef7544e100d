"""What the suite shows becomes measurements of the startup stage, judged by its checklist, told in findings."""

from __future__ import annotations

import datetime
import json

import broken
import pytest
import torch

from harness import gate
from harness.adapter import Inputs, Operator
from harness.cases import ModelInfo
from harness.checklist import load_checklists
from harness.diagnose import explain
from harness.ops.facts import operator_facts
from harness.ops.runtime import runtime_facts
from harness.plan import out_of_judgement
from harness.stages import operators
from harness.stages.operators import FIRST, OPERATOR_METRICS, SPAN, coverage_facts, operators_of
from harness.types import Case, Run, Scope, Setup, Status, Trace

RUN = Run(id="startup/operators", stage="startup", kind="operators")
CASE = Case(id="few", token_ids=(1, 2, 3))


class Port:
    """A model of one product, with operators of its own."""

    name, scope = "port", Scope()

    def __init__(self, fails: str = "", **table):
        self.fails, self.table = fails, table

    def operators(self):
        return self.table

    def prepare(self, case, record):
        return Inputs(token_ids=torch.tensor([case.token_ids]))

    def forward(self, inputs, record):
        if self.fails:
            raise RuntimeError(self.fails)
        return inputs.token_ids.float() @ torch.ones(3, 2)


def facts_of(port, **options):
    setup = Setup(side="accel", role="accel", adapter="x", options=options)
    with torch.no_grad():
        return json.loads(json.dumps(operator_facts(port, setup, CASE, {}, lambda _: None), allow_nan=False))


def judged(facts):
    criteria = load_checklists().by_stage["startup"]
    mine = [c for c in criteria if c.metric in OPERATOR_METRICS]
    found = operators_of(RUN, facts)
    verdicts, unjudged = gate.judge(
        criteria=mine, measurements=found, in_scope=lambda _: "", today=datetime.date(2026, 1, 1)
    )
    assert unjudged == []
    findings = explain(gate.breaking(verdicts, found), modules={}, reproduce="")
    return {v.criterion.id: v.status for v in verdicts}, findings


def test_a_port_whose_operators_are_right_passes():
    """Only what the model uses is judged, everything promised is measured, and the table says who serves it."""
    facts = facts_of(Port(softmax=Operator(call=torch.softmax, level="compiled"), mla="custom"))
    statuses, findings = judged(facts)
    assert set(statuses.values()) == {Status.PASSED}
    assert findings == []
    assert {r["family"] for r in facts["results"] if not r["own"]} <= {"matrix", "copies", "places"}
    table = coverage_facts(facts)
    assert table["own"] == {"softmax": "compiled", "mla": "custom"}
    assert not table["decode_counted"]
    assert "plain CPU" in table["runtime"]["not_applicable"]


@pytest.mark.parametrize(("name", "call", "criterion", "words"), [
    ("softmax", broken.softmax_wrong_in_a_band, "startup.operators", "widths 1025..2048"),
    ("topk", broken.topk_with_a_wrong_last, "startup.operators.indices", "the last index of a row"),
    ("softmax", broken.softmax_that_swallows_nan, "startup.operators.nonfinite", "special: masked, nonfinite"),
    ("copy", broken.copy_that_clobbers, "startup.operators.neighbours", "beside the output were overwritten"),
    ("silu", lambda x: x.copy_(torch.nn.functional.silu(x)), "startup.operators.inputs", "memory were changed"),
])  # fmt: skip
def test_a_broken_operator_fails_its_criterion_and_is_named(name, call, criterion, words):
    """The criterion that it breaks fails, and the first finding names the operator and what its wrong cases share."""
    statuses, findings = judged(facts_of(Port(**{name: Operator(call=call, level="triton")})))
    assert statuses[criterion] is Status.FAILED
    assert findings[0].tap == f"operators.{name}"
    told = " ".join((findings[0].cause, findings[0].message, *findings[0].evidence))
    assert words in told


@torch.library.custom_op("day0_stage_tests::grown", mutates_args=())
def grown(x: torch.Tensor) -> torch.Tensor:
    """Return x + 1, and write it to x as well, which the schema does not say."""
    return x.add_(1).clone()


@torch.library.custom_op("day0_stage_tests::kept", mutates_args=())
def kept(x: torch.Tensor) -> torch.Tensor:
    """Return x + 1."""
    return x + 1


for operator in (grown, kept):
    operator.register_fake(torch.empty_like)


@pytest.mark.parametrize(("operator", "status"), [(grown, Status.FAILED), (kept, Status.PASSED)])
def test_a_custom_operator_is_held_to_its_schema(monkeypatch, operator, status):
    """One that writes to what it is only given to read fails its criterion by name; its twin keeps the contract."""
    port = Port()
    forward = port.forward
    monkeypatch.setattr(port, "forward", lambda inputs, record: operator(forward(inputs, record)))
    facts = facts_of(port)
    (told,) = facts["contracts"]
    assert told["operator"] == f"day0_stage_tests::{operator._name.rpartition('::')[2]}"
    statuses, findings = judged(facts)
    assert statuses["startup.operators.contract"] is status
    assert [f.tap for f in findings] == ([told["operator"]] if status is Status.FAILED else [])


def test_what_a_spec_declares_of_a_device_is_allowed():
    """Sums in bfloat16 are refused, and accepted where the SPEC says that the device sums so."""
    port = Port(matmul=Operator(call=broken.matmul_sums_in_the_dtype, level="custom"))
    statuses, _ = judged(facts_of(port))
    assert statuses["startup.operators"] is Status.FAILED
    facts = facts_of(port, arithmetic_accumulate="bfloat16")
    assert set(judged(facts)[0].values()) == {Status.PASSED}
    assert facts["arithmetic"] == {"accumulate": "bfloat16"}


def refuses(wide: bool, everything: bool):
    """Return a softmax that declines wide rows, or all of them."""

    def call(x, dim):
        if everything or (wide and x.shape[dim] > 64):
            raise RuntimeError("no kernel for this width")
        return torch.softmax(x, dim)

    return call


@pytest.mark.parametrize(("everything", "status"), [(False, Status.PASSED), (True, Status.ERROR)])
def test_declining_aloud_is_no_wrong_value(everything, status):
    """What an operator declines with an exception is shown; one that declines everything could not be judged."""
    statuses, _ = judged(facts_of(Port(softmax=Operator(call=refuses(True, everything), level="custom"))))
    assert statuses["startup.operators"] is status
    assert (statuses["startup.operators.refused"] is Status.FAILED) is not everything


def test_an_output_of_another_shape_is_wrong():
    """An operator that gives another shape than its formula has failed, and is told so."""
    short = Operator(call=lambda x, dim: torch.softmax(x, dim)[..., :1], level="custom")
    statuses, findings = judged(facts_of(Port(softmax=short)))
    assert statuses["startup.operators"] is Status.FAILED
    assert "expected shape" in findings[0].message


@pytest.mark.parametrize("seen", [True, False])
def test_a_port_outside_of_torch_is_not_judged_by_what_torch_cannot_see(seen):
    """Where no operator was seen and none is offered, the criteria are out of scope with the reason."""
    setup = Setup(side="accel", role="accel", adapter="x")
    trace = Trace(setup=setup, run=RUN, taps={}, tensors={}, facts={"results": [{"needed": True}] if seen else []})
    info = ModelInfo(path="", config={}, vocab_size=8, layers=1, max_length_tokens=8)
    reason = out_of_judgement("operators", info, Scope(), frozenset(), oracles=(), ports=[trace])
    assert bool(reason) is not seen
    assert seen or "outside of torch" in reason


def test_a_model_that_raises_does_not_hide_its_operators():
    """Where the model cannot be run, every family is tested, and what it raised is told beside the table."""
    facts = facts_of(Port(fails="no such kernel"))
    assert facts["failed"] == "RuntimeError: no such kernel"
    assert {"attention", "matrix"} <= {r["family"] for r in facts["results"]}
    assert set(judged(facts)[0].values()) == {Status.PASSED}


def test_the_runtime_of_a_plain_cpu_is_not_tested():
    """On a plain CPU nothing of a device's runtime is asked, and the report says so."""
    found = runtime_facts("cpu")
    assert found["checks"] == {}
    assert "plain CPU" in found["not_applicable"]


@pytest.mark.parametrize("named", [("matmul", "copy"), ("matmul", "linear")])
def test_a_copy_is_to_blame_before_what_goes_through_it(named):
    """Copies that are wrong are the first finding, whatever else is; where they are right, the order is the suite's."""
    facts = facts_of(Port())
    for result in facts["results"]:
        if result["operator"] in named:
            result.update(wrong_cases=1, error_ratio=9.0, message="wrong")
    _, findings = judged(facts)
    first = "copy" if "copy" in named else "matmul"
    assert [f.tap for f in findings] == [f"operators.{first}", *(f"operators.{n}" for n in named if n != first)]


def test_findings_go_by_the_order_of_runs():
    """Two wrong operators, what the shadow saw of them on the model's input, further operators, then later runs."""
    results = [
        {"operator": f"o{n}", "variant": "", "family": "matrix", "needed": True, "wrong_cases": 1, "pattern": ""}
        for n in range(4)
    ]
    orders = operators._orders(results)
    assert orders[:FIRST] == [0, 1]
    assert all(2 * SPAN < order < 3 * SPAN for order in orders[FIRST:])
    assert operators._orders([{**r, "wrong_cases": 0} for r in results]) == [0, 1, 2, 3]
