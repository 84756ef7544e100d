"""The search for tokens that reach every expert, on a router that is a table."""

from __future__ import annotations

from typing import Any

import torch

from harness.adapter import Inputs, Recorder
from harness.cases import ModelInfo
from harness.compare import idle_experts
from harness.schedule import resolved
from harness.search import search
from harness.types import Case, Run, Setup, Tap, Trace

EXPERTS = 32
INFO = ModelInfo(path="", config={}, vocab_size=256, layers=1, max_length_tokens=512, experts=EXPERTS)
CASE = Case(id="base", token_ids=(1, 2, 3, 4))


class Table:
    """Sends token i to expert i modulo the experts, but to those from `dead` on never; groups are chosen first."""

    def __init__(self, dead: int = EXPERTS) -> None:
        self.dead, self.calls = dead, 0

    def prepare(self, case: Case, record: Recorder) -> Inputs:
        return Inputs(token_ids=torch.tensor([case.token_ids]))

    def forward(self, inputs: Inputs, record: Recorder) -> torch.Tensor:
        self.calls += 1
        ids = inputs.token_ids[0]
        scores = torch.nn.functional.one_hot(ids % min(self.dead, EXPERTS), EXPERTS).float()
        record("layers.0.moe.router.topk.scores", scores[:, :4], dims="token group", kind="scores")
        record("layers.0.moe.router.topk", ids[:, None] % 4, dims="token choice", kind="routing")
        record("layers.0.moe.router.topk.1.scores", scores, dims="token expert", kind="scores")
        record("layers.0.moe.router.topk.1", scores.argmax(-1, keepdim=True), dims="token choice", kind="routing")
        return torch.zeros(1, len(ids), 4)


def found(port: Any, most: int = 512) -> dict[str, Any]:
    run = Run(id="s", stage="text", kind="search", case=CASE, options={"tokens_per_expert": 2, "max_tokens": most})
    return dict(search(port, INFO, run, lambda _: None))


def test_every_expert_is_reached_and_the_prompt_only_grows():
    """The result begins with the case's own ids and gives each expert its two tokens."""
    facts = found(Table())
    assert facts["missing"] == {}
    assert facts["token_ids"][:4] == [1, 2, 3, 4]
    assert torch.bincount(torch.tensor(facts["token_ids"]) % EXPERTS, minlength=EXPERTS).min() >= 2


def test_a_dead_expert_is_named_and_the_search_ends():
    """What no token reaches is told by number; the effort is bounded."""
    port = Table(dead=30)
    facts = found(port)
    assert facts["missing"] == {"layers.0.moe.router.topk.1": [30, 31]}
    assert facts["forwards"] == port.calls <= 1 + 4 * 12
    assert len(found(Table(), most=20)["token_ids"]) <= 20


def test_idle_experts_are_too_few_samples_and_named():
    """Experts below the need make the measurement one without a value; tokens of several runs count together."""

    def trace(ids: torch.Tensor) -> Trace:
        name = "layers.0.moe.router.topk"
        return Trace(
            setup=Setup(side="reference", role="oracle", adapter="t"),
            run=Run(id="golden", stage="text", kind="forward"),
            taps={name: Tap(name=name, kind="routing", dims=("token", "choice"))},
            tensors={name: ids[:, None], f"{name}.scores": torch.zeros(len(ids), 4)},
            facts={},
        )

    run = Run(id="text/free", stage="text", kind="forward", case=CASE)
    once = trace(torch.tensor([0, 1, 2, 3]))
    (m,) = idle_experts("text", run, [once, trace(torch.tensor([0, 1, 2]))], experts=4, need=2)
    assert (m.value, m.problem, m.detail["experts"], m.run) == (None, "too_few", [3], "text/free")
    (m,) = idle_experts("text", run, [once, once], experts=4, need=2)
    assert (m.value, m.problem) == (0, "")


def test_runs_of_a_search_are_planned_with_what_it_found_or_dropped():
    """Found ids become the case of the runs that wait for them; if they are an ordinary case's own, those runs go."""
    plain = Run(id="text/free", stage="text", kind="forward", case=CASE)
    waiting = Run(
        id="text/free-reach", stage="text", kind="forward", case=Case(id="r", token_ids=(1,), source="search:s")
    )
    assert [r.id for r in resolved((plain, waiting), {"search:s": (1, 2, 3, 4)})] == ["text/free"]
    assert [r.id for r in resolved((plain, waiting), {})] == ["text/free"]
    (_, run) = resolved((plain, waiting), {"search:s": (1, 2, 9)})
    assert run.case is not None
    assert run.case.token_ids == (1, 2, 9)
