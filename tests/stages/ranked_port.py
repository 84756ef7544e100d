"""A port of two layers for the tests of the world: each rank holds half of a sum. It imports the protocol only.

Options: LAYOUT=FAULT for each layout in which something goes wrong on rank 1.
"""

from __future__ import annotations

import ctypes
import time

import torch
import torch.distributed as dist

from harness.adapter import Inputs
from harness.types import Layout, Scope

LAYOUTS = (Layout(tp=2), Layout(ep=2), Layout(pp=2), Layout(tp=2, ep=2))


def factory(checkpoint, setup):
    return Port(setup)


class Port:
    name = "ranked"

    def __init__(self, setup):
        self.scope = Scope(layouts=LAYOUTS)
        self.fault = setup.options.get(str(setup.layout))
        self.place = None

    def distribute(self, layout):
        self.place = layout
        self.rank = dist.get_rank()

    def simulate(self, layout, inputs, record):
        self.place, self.rank = None, 0
        return self.forward(inputs, record)

    def load(self, checkpoint, setup):
        draw = torch.Generator().manual_seed(1)
        self.table = torch.randn(16, 8, generator=draw)
        return {}

    def prepare(self, case, record):
        ids = torch.tensor([case.token_ids]) % 16
        return Inputs(token_ids=record("inputs.token_ids", ids, dims="batch token"))

    def _reduce(self, half):
        if self.place is None:
            return half * 2
        dist.all_reduce(half)
        return half

    def _misbehave(self):
        if self.rank != 1:
            return
        if self.fault == "raise":
            raise ValueError("a shard of 3 rows cannot be cut in 2")
        if self.fault == "segfault":
            ctypes.string_at(0)
        if self.fault == "hang":
            time.sleep(3600)

    def forward(self, inputs, record):
        x = record("embed", self.table[inputs.token_ids], dims="batch token feature")
        for n in range(2):
            if n == 1:
                self._misbehave()
            x = record(f"layers.{n}", self._reduce(torch.tanh(x) / 2), dims="batch token feature")
        return record("logits", x @ self.table.T, dims="batch token vocab")

    def generate(self, inputs, max_new_tokens, record):
        ids = inputs.token_ids
        for _ in range(max_new_tokens):
            logits = self.forward(Inputs(token_ids=ids), record)
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        return ids[0, inputs.token_ids.shape[1] :].tolist()

    def close(self):
        pass
