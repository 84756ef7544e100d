"""Checkpoints at rest: containers, formats, decoders, the audit of weights, memory plans. Must not know model code."""

from harness.checkpoint.container import Checkpoint, open_checkpoint
from harness.checkpoint.formats import Logical, decode, logical_tensors
from harness.checkpoint.header import Problem, TensorRef

__all__ = ["Checkpoint", "Logical", "Problem", "TensorRef", "decode", "logical_tensors", "open_checkpoint"]
