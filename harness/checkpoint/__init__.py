"""Checkpoints at rest: containers, formats, decoders, the audit of weights, memory plans. Must not know model code."""

from harness.checkpoint.audit import audit_weights
from harness.checkpoint.container import Checkpoint, open_checkpoint
from harness.checkpoint.fact import WeightFact
from harness.checkpoint.facts import audit_facts, checkpoint_facts
from harness.checkpoint.formats import Logical, decode, format_problems, logical_tensors
from harness.checkpoint.header import Problem, TensorRef
from harness.checkpoint.needed import needed_words
from harness.checkpoint.plan import MemoryPlan, memory_plan, planned_bytes, window_plan

__all__ = [
    "Checkpoint",
    "Logical",
    "MemoryPlan",
    "Problem",
    "TensorRef",
    "WeightFact",
    "audit_facts",
    "audit_weights",
    "checkpoint_facts",
    "decode",
    "format_problems",
    "logical_tensors",
    "memory_plan",
    "needed_words",
    "open_checkpoint",
    "planned_bytes",
    "window_plan",
]
