"""An engine that day0 cannot call: it is recorded where it serves, and judged from its recordings.

    python examples/recorded_engine.py CHECKPOINT GOLDENS/requests.json OUT

The engine here is transformers serving a request in chunks over a cache; yours is what it is. What it needs from day0
is one file, `harness/dropin.py` (torch only, copy it), and the lines that speak of the recorder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from harness.dropin import Recorder  # or, where the file was copied to: from dropin import Recorder

CHUNK = 24


def serve(model: torch.nn.Module, name: str, ids: list[int], recorder: Recorder) -> None:
    """Serve one request in chunks, the last token as a decode step."""
    cache = None
    stops = [*range(CHUNK, len(ids) - 1, CHUNK), len(ids) - 1, len(ids)]
    for start, stop in zip([0, *stops], stops, strict=False):
        recorder.tokens(name, range(start, stop), ids=ids[start:stop])  # whose rows the next forward holds
        cache = model(torch.tensor([ids[start:stop]]), past_key_values=cache, use_cache=True).past_key_values


def main(checkpoint: str, requests: str, out: str) -> None:
    """Record every request."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    with torch.no_grad(), Recorder(out, names=["*"], about={"engine": "transformers, in chunks"}) as recorder:
        recorder.watch(model)  # statistics of every module; tensors of `names`
        for name, ids in json.loads(Path(requests).read_text()).items():
            serve(model, name, ids, recorder)


if __name__ == "__main__":
    main(*sys.argv[1:])
