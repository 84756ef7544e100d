"""Known mistakes that cannot be injected here yet, each with the reason. Data only."""

from __future__ import annotations

from harness.faults.catalogue import Pending

_SERVICE = "needs a text front end or an endpoint"
_RANKS = "needs several ranks"

PENDING = tuple(
    Pending(id=id, says=says, why=why)
    for id, says, why in (
        ("ST01", "a second BOS from template and tokenizer", _SERVICE),
        ("ST03", "a reserved token that the tokenizer splits", _SERVICE),
        ("ST04", "characters of several tokens lost in streams", _SERVICE),
        ("ST06", "a parser of tool calls that knows one form of an id", _SERVICE),
        ("ST08", "memory outside of the allocator left out of the plan", _SERVICE),
        ("ST11", "log probabilities shifted by one", _SERVICE),
        ("AC03", "a finite check that writes out of bounds", "needs device memory that is not bounds-checked"),
        ("LC05", "partial attention merged where a context is empty", "needs batches of mixed lengths"),
        ("IM11", "a causal mask inside of pictures", "no architecture here attends both ways inside a picture"),
        ("TX30", "a draft head fed in another order", "no architecture here has a draft head"),
        ("SP04", "layers that share a selection choose for themselves", "no tiny model here shares a selection"),
        ("MC01", "a bias added on every rank", _RANKS),
        ("MC03", "a shared expert that is never reduced", _RANKS),
        ("MC06", "partial sums of different tokens added", _RANKS),
        ("MC10", "sinks of rank 0 on every rank", _RANKS),
        ("MC14", "a send buffer written before it was sent", _RANKS),
        ("MC16", "each rank samples alone", _RANKS),
        ("MC18", "partial attention of ranks merged without its sum", _RANKS),
        ("BN19", "a request computed again after preemption", _SERVICE),
        ("BN21", "other samples from the same seed", "needs a sampler"),
        ("BN27", "a reference with rotary tables in bf16", "needs a faulty reference"),
        ("BN28", "pictures resized by another library", "needs pictures that are resized"),
        ("BN29", "another number of cache blocks at the second start", _SERVICE),
    )
)
"""What `day0 prove` lists beside its table."""
