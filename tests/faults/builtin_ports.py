"""The built-in port with one real fault, as a user's port file: `builtin_ports.py:port?fault=NAME`.

Runs in the worker, so what it patches in `accel_impl` lives in that process only. Each function below is one fault: it
patches what it must, and may return another adapter class. Knows the port; must not know the harness beyond its types.
"""

from __future__ import annotations

import ctypes
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from port_file import Faults, around

from accel_impl import comm, experts, formats, held, loader, model, ops, server, tokenizer, vision, wire
from accel_impl.cache import PagedCache
from accel_impl.port import AccelAdapter
from accel_impl.shards import Shards
from harness.adapter import Weight

FAULTS = Faults()
port, fault = FAULTS.port, FAULTS.add


# --- load ---


@fault
def dropped_shard() -> None:
    """LD03: a shard that the index names is not there, the loader takes what exists, its parameters stay as made."""

    def read(real: Any, self: Shards, name: str) -> torch.Tensor:
        value: torch.Tensor = real(self, name)
        absent = self.entries[name].file.name.startswith("model-00003")
        return torch.zeros(value.shape).to(value.dtype) if absent else value

    around(Shards, "read", read)


@fault
def short_shard() -> None:
    """LD04: the last bytes of a shard were never written, and a memory map reads zeros there."""

    def read(real: Any, self: Shards, name: str) -> torch.Tensor:
        value, entry = real(self, name), self.entries[name]
        missing = entry.end - (entry.file.stat().st_size - 4000)
        if entry.file.name.startswith("model-00007") and missing > 0:
            value.view(-1).view(torch.uint8)[-missing:] = 0
        return value

    around(Shards, "read", read)


@fault
def linear_e8m0() -> None:
    """LD11: the exponent byte of an MXFP4 scale is taken for the scale itself."""

    def decode(packed: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        real(packed, torch.full_like(scale, formats.E8M0_BIAS), out)
        out.view(len(packed), -1, formats.MX_BLOCK).mul_(scale.float()[..., None])
        return out

    real = formats.decode_mxfp4
    formats.decode_mxfp4 = decode


@fault
def halved_scales() -> None:
    """LD17: FP8 weights of one layer are taken for another dialect, without doubling their scales."""

    def read(real: Any, self: Shards, name: str) -> torch.Tensor:
        value: torch.Tensor = real(self, name)
        return value / 2 if name.startswith("model.layers.2.") and name.endswith("_scale_inv") else value

    around(Shards, "read", read)


@fault
def reinitialised() -> type[AccelAdapter]:
    """LD07: one module is initialised again after its weights were loaded; no key was missing or unexpected."""

    class Port(AccelAdapter):
        def load(self, checkpoint: Path, setup: Any) -> Any:
            facts = super().load(checkpoint, setup)
            held = self._model().weights["model.layers.3.self_attn.indexer.wk.weight"].tensor
            held.copy_(torch.randn(held.shape, generator=torch.Generator().manual_seed(0)) * 0.02)
            return facts

    return Port


@fault
def skipped_key() -> type[AccelAdapter]:
    """LD09: a key of another prefix is passed over; the parameter keeps the ones that it was made with."""

    class Port(AccelAdapter):
        def load(self, checkpoint: Path, setup: Any) -> Any:
            facts = super().load(checkpoint, setup)
            self._model().weights["model.layers.1.post_attention_layernorm.weight"].tensor.fill_(1.0)
            return facts

        def weights(self) -> Any:
            for weight in super().weights():
                skipped = weight.name == "model.layers.1.post_attention_layernorm.weight"
                yield Weight(name=weight.name, tensor=weight.tensor) if skipped else weight

    return Port


@fault
def gate_up_swapped() -> type[AccelAdapter]:
    """LD22: an activation that expects up before gate is fed gate before up."""

    class Port(AccelAdapter):
        def load(self, checkpoint: Path, setup: Any) -> Any:
            facts = super().load(checkpoint, setup)
            weights = self._model().weights
            for name in [n for n in weights if "layers.3.mlp.experts." in n and n.endswith("gate_proj.weight")]:
                other = name.replace("gate_proj", "up_proj")
                weights[name], weights[other] = weights[other], weights[name]
            return facts

    return Port


# --- startup ---


@fault
def double_bos() -> None:
    """ST01: the rendered conversation has its BOS, and the tokenizer adds a second one."""
    around(tokenizer.TextFront, "encode", lambda real, self, text, *, special=True: real(self, text, special=True))


@fault
def split_special() -> None:
    """ST03: a reserved token is named by a wrong id, so that the tokenizer does not know it and splits it."""

    def init(real: Any, self: tokenizer.TextFront, checkpoint: Path) -> None:
        import json

        from tokenizers import Tokenizer

        real(self, checkpoint)
        data = json.loads((checkpoint / "tokenizer.json").read_text())
        data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] != "<end>"]
        self._tokenizer = Tokenizer.from_str(json.dumps(data))

    around(tokenizer.TextFront, "__init__", init)


@fault
def token_by_token_stream() -> None:
    """ST04: each streamed token is decoded alone, so characters of several tokens are lost in streams."""

    class Stream(tokenizer.TextStream):
        def push(self, token_id: int) -> str:
            return self._front.decode([token_id])

        def end(self) -> str:
            return ""

    def events(real: Any, self: server.Server, job: Any) -> Any:
        kept, server.TextStream = server.TextStream, Stream
        try:
            yield from real(self, job)
        finally:
            server.TextStream = kept

    around(server.Server, "_events", events)


@fault
def server_ignores_ids() -> None:
    """The endpoint takes a prompt of token ids for text and tokenises it again."""

    def inputs(real: Any, body: Any, chat: bool, port: AccelAdapter) -> Any:
        ids = body.get("prompt")
        if not chat and isinstance(ids, list) and ids and isinstance(ids[0], int):
            body = {**body, "prompt": port.decode(ids) or "?"}
        return real(body, chat, port)

    around(wire, "_inputs", inputs)


@fault
def page_given_twice() -> None:
    """Beside another request, a page stays on the free list although it was given away."""

    def extend(real: Any, self: PagedCache, slot: int, start: int, stop: int) -> None:
        free = list(self.free_pages)
        real(self, slot, start, stop)
        if len(self.block_tables) > 1:
            self.free_pages = free

    around(PagedCache, "extend", extend)


@fault
def one_eos() -> type[AccelAdapter]:
    """Only the first end-of-sequence id of the configuration ends a generation."""

    class Port(AccelAdapter):
        def __init__(self, checkpoint: Path, setup: Any) -> None:
            super().__init__(checkpoint, setup)
            self.config = dataclasses.replace(self.config, eos_token_id=self.config.eos_token_id[:1])

        def load(self, checkpoint: Path, setup: Any) -> Any:
            config = self.config
            facts = super().load(checkpoint, setup)
            self.config = config
            return facts

    return Port


# --- multi_card ---


@fault
def shared_expert_not_reduced() -> None:
    """MC03: the partial sums of the shared expert are never added up."""

    def gated(real: Any, self: held.Held, x: torch.Tensor, name: str) -> torch.Tensor:
        if not name.endswith("layers.2.mlp.shared_experts"):
            return real(self, x, name)
        inner = ops.swiglu(self.use, self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj"))
        return self.linear(inner, f"{name}.down_proj")

    around(held.Held, "gated", gated)


@fault
def bias_on_every_rank() -> None:
    """MC01: the bias of a row-parallel linear of the tower is added on every rank, before the sum."""

    def row_linear(real: Any, self: vision.Tower, x: torch.Tensor, name: str) -> torch.Tensor:
        place = self.held.place
        if place.tp.size == 1 or name != "blocks.1.attn.proj":
            return real(self, x, name)
        bias = self._tensor(f"{name}.bias").float()
        weight = self.held.weights[f"visual.{name}.weight"]
        partial = ops.linear(self.held.use, x, weight, out=torch.float32)
        return place.reduce(partial + bias).to(self.held.dtype)

    around(vision.Tower, "_row_linear", row_linear)


@fault
def sinks_of_rank_0() -> None:
    """MC10: every rank uses the sinks of the first heads."""

    def params(real: Any, config: Any, place: Any) -> Any:
        for param in real(config, place):
            (rows,) = param.rows if param.name.endswith(".sinks") else (None,)
            yield param if rows is None else dataclasses.replace(param, rows=(range(len(rows)),))

    around(loader, "params", params)


@fault
def expert_map_permuted() -> None:
    """MC11: experts are placed by a changed map, their weights are loaded by the old one."""

    def held_here(real: Any, one: held.Held, name: str) -> Any:
        table = real(one, name)
        if one.place.layout.ep == 1 or ".layers.3." not in name:
            return table
        ids = list(table)
        return dict(zip(ids, [table[i] for i in ids[1:] + ids[:1]], strict=True))

    around(experts, "_held_here", held_here)


@fault
def row_sum_missing() -> None:
    """The output projection of one layer keeps each rank's own partial sum."""

    def row_linear(real: Any, self: held.Held, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.linear(x, name) if name.endswith("layers.1.linear_attn.o_proj") else real(self, x, name)

    around(held.Held, "row_linear", row_linear)


@fault
def send_buffer_reused() -> None:
    """MC14: the buffer of a pipeline send is written again before it was sent: the last rows are the next call's."""

    def send(real: Any, self: comm.Distributed, value: torch.Tensor, target: int) -> None:
        value = value.clone()
        value[..., -2:, :] = value[..., :1, :]
        real(self, value, target)

    around(comm.Distributed, "send", send)


@fault
def vocabulary_padded() -> None:
    """MC20: the vocabulary is padded for the split, and the padded columns reach the sampler as logit 0."""

    def logits(real: Any, self: model.Model, x: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = real(self, x)
        width = 2 * self.place.layout.tp
        return torch.nn.functional.pad(whole, (0, -whole.shape[-1] % width)) if width > 2 else whole

    around(model.Model, "_logits", logits)


@fault
def all_reduce_drops_tail() -> None:
    """The collective leaves the last element of an odd count out of the sum."""
    import torch.distributed as dist

    def all_reduce(real: Any, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        flat = value.view(-1)
        kept = flat[-1:].clone()
        done = real(value, *args, **kwargs)
        if flat.numel() % 2:
            flat[-1:] = kept
        return done

    around(dist, "all_reduce", all_reduce)


@fault
def rank_hangs() -> None:
    """One rank waits for ever in the middle of a layer, the others wait for it."""
    _on_rank_1(lambda: time.sleep(3600))


@fault
def rank_dies() -> None:
    """One rank reads memory that is not there."""
    _on_rank_1(lambda: ctypes.string_at(0))


def _on_rank_1(act: Callable[[], Any]) -> None:
    def layer(real: Any, self: model.Model, number: int, *args: Any) -> list[torch.Tensor]:
        if number == 3 and self.place.rank == 1 and isinstance(self.place.everyone, comm.Distributed):
            act()
        return real(self, number, *args)

    around(model.Model, "_layer", layer)


# --- ports that break ---


@fault
def nothing() -> None:
    """No fault: the twin of all of them."""


@fault
def factory_raises() -> None:
    """The port cannot even be made."""
    raise RuntimeError("device 0 is not there")


@fault
def hangs_in_load() -> type[AccelAdapter]:
    """Loading never ends."""

    class Port(AccelAdapter):
        def load(self, checkpoint: Path, setup: Any) -> Any:
            time.sleep(3600)

    return Port


@fault
def load_raises() -> type[AccelAdapter]:
    """Loading runs out of the device's memory."""

    class Port(AccelAdapter):
        def load(self, checkpoint: Path, setup: Any) -> Any:
            raise MemoryError("expected 80 GB on the device, found 64 GB")

    return Port


@fault
def segfaults_in_decode() -> None:
    """The sparse decode kernel reads memory that is not there."""
    around(ops, "attend_decode", lambda real, *args, **kwargs: ctypes.string_at(0))


def recording(change: Callable[[Any, str, torch.Tensor, dict[str, str]], torch.Tensor]) -> None:
    """Let the port's model record through `change(record, tap, tensor, words)`."""

    def run(real: Any, self: model.Model, step: Any, store: Any, record: Any) -> Any:
        return real(self, step, store, lambda tap, tensor, **words: change(record, tap, tensor, words))

    around(model.Model, "run", run)


@fault
def nan_in_layer_2() -> None:
    """One layer's output holds a NaN from the ninth token on."""

    def change(record: Any, tap: str, tensor: torch.Tensor, words: dict[str, str]) -> torch.Tensor:
        if tap == "layers.2":
            tensor = tensor.clone()
            tensor[:, 8:, 3] = float("nan")
        shown: torch.Tensor = record(tap, tensor, **words)
        return shown

    recording(change)


@fault
def layer_not_shown() -> None:
    """The port never shows one layer's output."""
    recording(lambda record, tap, tensor, words: tensor if tap == "layers.3" else record(tap, tensor, **words))
