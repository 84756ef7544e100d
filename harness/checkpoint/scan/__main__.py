"""Read a checkpoint in a process of its own: words on standard input, lines of JSON on standard output, facts on disk.

    python -m harness.checkpoint.scan

A line is `{"note": ...}` (worth a line of a log), `{"at": ...}` (how far it is) or, at the end, `{"done": true}` or
`{"error": ...}`. Whoever started it must not know more.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from harness.checkpoint.container import open_checkpoint
from harness.checkpoint.scan.facts import content_facts
from harness.errors import CheckpointError


def main() -> int:
    """Do what the words ask."""
    words = json.loads(sys.stdin.readline())
    torch.set_num_threads(1)  # threads are those of the pass
    manifest, state = (Path(words[k]) if words.get(k) else None for k in ("manifest", "state"))
    try:
        facts = content_facts(
            open_checkpoint(words["checkpoint"]),
            manifest=manifest,
            state=state,
            again=bool(words.get("again")),
            told=lambda text: _say(at=text),
            noted=lambda text: _say(note=text),
        )
    except (CheckpointError, OSError) as error:
        _say(error=str(error))
        return 1
    out = Path(words["out"])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(facts, allow_nan=False))
    _say(done=True)
    return 0


def _say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    sys.exit(main())
