"""A port that is up but speaks wrongly: refused by the startup stage, which says in which request or text."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("fault", "criterion", "place", "cause"),
    [
        ("double_bos", "startup.template", "template.prepared", "second BOS"),
        ("split_special", "startup.tokenizer", "tokenizer.encode", "special tokens"),
        ("token_by_token_stream", "startup.endpoint", "endpoint.stream", "tokens decoded alone"),
        ("server_ignores_ids", "startup.endpoint", "endpoint.completion", "otherwise than the port itself"),
        ("page_given_twice", "startup.concurrent", "slots", "disturb each other"),
        ("one_eos", "startup.eos", "eos_ids", "end-of-sequence"),
    ],
)
def test_a_port_that_speaks_wrongly_is_refused(later, fault, criterion, place, cause):
    """The run ends at startup with the text, request or id that is wrong."""
    served = () if place.startswith("endpoint") else ("--set", "scope.serves=false")
    outcome = later(fault, "--set", "scope.off.operators=judged by tests of their own", *served, stage="startup,text")
    first = outcome.refused_at("startup")
    assert first["tap"] == place
    assert cause in first["cause"]
    assert criterion in outcome.broken("startup")
