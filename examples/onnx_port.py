"""A port that is another engine: a transformers checkpoint in ONNX Runtime, its hidden states as outputs of the graph.

    day0 verify --reference hf:FOLDER --accel 'examples/onnx_port.py:factory?dtype=float32'

An engine like this shows the places that its graph was told to show (embedding, every layer, final norm, logits) and
cannot go on with tensors from outside, so its scope says `replay=False` and names what it cannot show; day0 then judges
each layer by running the reference on the values that the engine recorded. Needs transformers, onnx, onnxscript and
onnxruntime. The graph is exported once per checkpoint and kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.adapter import Inputs, Recorder, TokenIds
from harness.adapters.text import TextFrontEnd, end_ids
from harness.checkpoint import open_checkpoint
from harness.errors import PortError
from harness.types import Case, Facts, Scope, Setup

INSIDE = "inside the graph: ONNX Runtime shows its outputs only"
EXAMPLE_TOKENS = 12
LONGEST_TOKENS = 8192


def factory(checkpoint: Path, setup: Setup) -> OnnxPort:
    """Return the port; day0 calls this."""
    if setup.dtype != "float32":
        raise PortError(f"expected dtype float32, found {setup.dtype}; write onnx_port.py:factory?dtype=float32")
    return OnnxPort(checkpoint)


class OnnxPort:
    """An Adapter whose forward is one call of an ONNX graph."""

    name = "onnxruntime"

    def __init__(self, checkpoint: Path) -> None:
        self.text, self.ending = TextFrontEnd(checkpoint), end_ids(checkpoint)
        self.scope = Scope(
            chat=(checkpoint / "tokenizer.json").is_file(),
            replay=False,
            max_length_tokens=LONGEST_TOKENS,
            unobservable={"layers.*.*": INSIDE},
            off={
                "replay": "a graph cannot go on with tensors from outside",
                "phases": "exported without a cache: every call is a whole prefill",
                "weights": "folded into the graph, transposed and shared as its optimiser likes",
                "multi_card": "one session on one device",
                **({} if (checkpoint / "tokenizer.json").is_file() else {"chat": "the checkpoint has no tokenizer"}),
            },
        )
        self.session: Any = None
        self.outputs: list[str] = []

    def load(self, checkpoint: Path, setup: Setup) -> Facts:
        """Export the graph unless it is cached, and open a session."""
        import onnxruntime

        path, names = exported(checkpoint)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = setup.threads
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.outputs = names
        found = [o.name for o in self.session.get_outputs()]
        if found != names:
            raise PortError(f"expected the graph's outputs {names}, found {found}; delete {path.parent}")
        return {"graph_bytes": sum(f.stat().st_size for f in path.parent.iterdir())}

    def prepare(self, case: Case, record: Recorder) -> Inputs:
        """Turn a case into token ids."""
        ids = case.token_ids
        if ids is None and case.messages is not None:
            ids = tuple(self.text.encode(self.text.render(case.messages), special=False))
        elif ids is None:
            ids = tuple(self.text.encode(case.prompt or ""))
        inputs = Inputs(token_ids=torch.tensor([list(ids)], dtype=torch.int64))
        record("inputs.token_ids", inputs.token_ids, dims="batch token")
        return inputs

    def forward(self, inputs: Inputs, record: Recorder) -> Tensor:
        """Run the graph; record each output under the name it was exported with."""
        values = self.session.run(None, {"input_ids": inputs.token_ids.numpy()})
        result = torch.empty(0)
        for name, value in zip(self.outputs, values, strict=True):
            last = "vocab" if name == "logits" else "feature"
            result = record(name, torch.from_numpy(value), dims=f"batch token {last}")
        return result

    def generate(self, inputs: Inputs, max_new_tokens: int, record: Recorder) -> TokenIds:
        """Generate greedily; without a cache every step is a whole prefill."""
        ids = inputs.token_ids
        new: TokenIds = []
        while len(new) < max_new_tokens and not (new and new[-1] in self.ending):
            logits = self.session.run(["logits"], {"input_ids": ids.numpy()})[0]
            new.append(int(logits[0, -1].argmax()))
            ids = torch.cat([ids, torch.tensor([[new[-1]]])], dim=1)
        return new

    def encode(self, text: str) -> TokenIds:
        """Tokenise plain text."""
        return self.text.encode(text)

    def decode(self, token_ids: Any) -> str:
        """Turn token ids into text."""
        return self.text.decode(token_ids)

    def render(self, messages: Any) -> str:
        """Render a conversation."""
        return self.text.render(messages)

    def eos_ids(self) -> frozenset[int]:
        """Return the ids that end a generation."""
        return self.ending

    def close(self) -> None:
        """Drop the session."""
        self.session = None


class Observed(nn.Module):
    """A causal language model that returns its hidden states by name, in execution order, and the logits last."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.names: list[str] = []
        self._seen: list[Tensor] = []
        decoder = model.get_decoder()
        places = [("embed", model.get_input_embeddings())]
        places += [(f"layers.{i}", layer) for i, layer in enumerate(decoder.layers)]
        places += [("norm", decoder.norm)]
        for name, module in places:
            self.names.append(name)
            module.register_forward_hook(self._keep)
        self.names.append("logits")

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        self._seen.append(output[0] if isinstance(output, tuple) else output)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        """Return every named tensor. input_ids: [1, T]."""
        self._seen = []
        logits = self.model(input_ids=input_ids, use_cache=False).logits
        seen, self._seen = self._seen, []
        return (*seen, logits)


def exported(checkpoint: Path) -> tuple[Path, list[str]]:
    """Return the graph of a checkpoint, and its outputs' names; export it if it is not in the cache."""
    import transformers

    made_by = inspect.getsource(Observed) + inspect.getsource(_export)
    own = hashlib.blake2b(made_by.encode(), digest_size=8).hexdigest()
    versions = f"{torch.__version__}-{transformers.__version__}-{own}"
    cache = os.environ.get("XDG_CACHE_HOME")
    base = (Path(cache) if cache else Path.home() / ".cache") / "day0" / "onnx"
    folder = base / f"{open_checkpoint(checkpoint).digest}-{versions}"
    names_file = folder / "outputs.txt"
    if not names_file.is_file():
        scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            names = _export(checkpoint, scratch / "model.onnx")
            (scratch / names_file.name).write_text("\n".join(names))
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder / "model.onnx", names_file.read_text().split("\n")


def _export(checkpoint: Path, path: Path) -> list[str]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    observed = Observed(model.eval()).eval()
    example = torch.arange(EXAMPLE_TOKENS, dtype=torch.int64)[None] % model.config.get_text_config().vocab_size
    length = torch.export.Dim("length", min=2, max=LONGEST_TOKENS)
    with torch.no_grad():
        torch.onnx.export(
            observed,
            (example,),
            path,
            dynamo=True,
            input_names=["input_ids"],
            output_names=observed.names,
            dynamic_shapes={"input_ids": {1: length}},
            external_data=True,
        )
    return observed.names
