"""Ports that hold numbers in narrower formats, written from torch's own types and not from `harness.precision`.

`quantised_ports.py:port?hold=NAME` loads the model of the checkpoint and makes it hold its numbers as NAME says. Those
of `HONEST` do what `DECLARED` says, each in a way of its own; the others have the mistake that their name says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

E4M3 = 448.0
FILE = 30.0
"""A bound on keys and values that a calibration might have found."""
Write = Callable[[Tensor, str], Tensor]


def port(checkpoint: Path, setup: Any) -> Any:
    """Return an adapter of the checkpoint's model that holds its numbers as the option `hold` says."""
    from harness.adapters.hf import load_module
    from harness.adapters.module import Loaded, ModuleAdapter
    from harness.types import Setup

    hold = setup.options["hold"]
    plain = Setup(side="accel", role="accel", adapter="", dtype=setup.dtype)

    def load(*_: Any) -> Loaded:
        module = load_module(checkpoint, plain).module.eval()
        HOLDS[hold](module)
        return Loaded(module=module)

    return ModuleAdapter(load, checkpoint, setup, name=f"hold={hold}", wide=hold.startswith("state"))


# --- caches ---


class Written:
    """A cache that rounds what it is given; everything else is the cache's own."""

    def __init__(self, cache: Any, write: Write) -> None:
        self._cache, self._write = cache, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        """Round keys and values, and write them."""
        return self._cache.update(
            self._write(key, f"{layer}.key"), self._write(value, f"{layer}.value"), layer, *args, **kwargs
        )

    def update_recurrent_state(self, state: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        """Round a state, and write it."""
        return self._cache.update_recurrent_state(self._write(state, f"{layer}.state"), layer, *args, **kwargs)


def _cached(write: Write) -> Callable[[nn.Module], None]:
    def hang(module: nn.Module) -> None:
        for name, part in module.named_modules():
            if name.rsplit(".", 1)[-1] in ("self_attn", "linear_attn"):
                part.register_forward_pre_hook(_given(write), with_kwargs=True)

    return hang


def _given(write: Write) -> Callable[..., Any]:
    def before(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        found = {k: Written(v, write) for k, v in kwargs.items() if k in ("cache", "past_key_values") and v is not None}
        return args, {**kwargs, **found}

    return before


def fp8(value: Tensor, scale: Tensor | float) -> Tensor:
    """Round to E4M3 under a scale, saturating."""
    held = (value.float() / scale).clamp(-E4M3, E4M3).to(torch.float8_e4m3fn)
    return (held.float() * scale).to(value.dtype)


def _no_scale(value: Tensor, name: str) -> Tensor:
    return fp8(value, 1.0)


def _scale_of_four(value: Tensor, name: str) -> Tensor:
    return fp8(value, 0.25)


def _by_key(value: Tensor, name: str) -> Tensor:
    return fp8(value, value.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / E4M3)


def _from_file(value: Tensor, name: str) -> Tensor:
    return fp8(value, FILE / E4M3)


def _not_delivered(value: Tensor, name: str) -> Tensor:
    """LC07: the write kernel gets no scale, the read multiplies with it."""
    return fp8(value, 1.0) * (FILE / E4M3 if name.endswith("value") else 1.0)


def _half_delivered(value: Tensor, name: str) -> Tensor:
    """LC07 in one layer: written under one scale, read under another that is a little larger."""
    return fp8(value, FILE / E4M3) * (1.03 if name == "1.value" else 1.0)


def _frozen() -> Write:
    """LC08: the scale stays that of a warm-up with one token of little content."""
    return lambda value, name: fp8(value, (1.2 if name.startswith("1.") else FILE) / E4M3)


def _state(dtype: torch.dtype) -> Write:
    """A state stored in a narrow type, updated in a wide one."""
    return lambda value, name: value.to(dtype).to(value.dtype) if name.endswith("state") else value


# --- weights and activations ---


def _linears(module: nn.Module) -> dict[str, nn.Linear]:
    skip = ("lm_head", "gate", "router")
    return {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear) and n.rsplit(".", 1)[-1] not in skip}


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and one scale for each row."""
    scale = weight.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (weight.float() / scale).round().clamp(-127, 127).to(torch.int8), scale


class Int8Linear(nn.Module):
    """Integer products: both factors int8, scales by row and by token."""

    def __init__(self, linear: nn.Linear, factor: float = 1.0) -> None:
        super().__init__()
        codes, scale = int8_rows(linear.weight.detach())
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("weight_scale", scale * factor)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Multiply in integers, scale once."""
        codes, scale = int8_rows(x)
        y = (codes.float() @ self.weight.float().T) * (scale * self.weight_scale.T)
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)


def _int8(module: nn.Module, *, wrong: str = "") -> None:
    for name, linear in _linears(module).items():
        owner = module.get_submodule(name.rpartition(".")[0])
        factor = 0.5 if wrong and name.endswith(wrong) else 1.0
        setattr(owner, name.rpartition(".")[2], Int8Linear(linear, factor))


class Fp8Linear(nn.Module):
    """E4M3 weights under a grid of scales, multiplied out as they are used."""

    def __init__(self, linear: nn.Linear, block: int, *, transposed: bool = False) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        rows, columns = weight.shape
        grid = weight.unflatten(0, (rows // block, block)).unflatten(2, (columns // block, block))
        scale = grid.abs().amax(dim=(1, 3)).clamp(min=1e-12) / E4M3
        self.block, self.bias = block, linear.bias
        codes = (weight / self._whole(scale)).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(codes, requires_grad=False)
        turned = scale.T.reshape(scale.shape).contiguous() if transposed else scale
        self.register_buffer("weight_scale_inv", turned)

    def _whole(self, scale: Tensor) -> Tensor:
        return scale.repeat_interleave(self.block, 0).repeat_interleave(self.block, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply out, then apply."""
        weight = (self.weight.float() * self._whole(self.weight_scale_inv)).to(x.dtype)
        return nn.functional.linear(x, weight, self.bias)


def _fp8_blocks(module: nn.Module, *, wrong: str = "") -> None:
    for name, linear in _linears(module).items():
        owner = module.get_submodule(name.rpartition(".")[0])
        turned = bool(wrong) and name.endswith(wrong)
        setattr(owner, name.rpartition(".")[2], Fp8Linear(linear, 16, transposed=turned))
    for name, value in module.named_parameters():
        if value.dim() == 3 and "conv" not in name:
            value.data = _fp8_experts(value.data, transposed=bool(wrong) and name.startswith("model.layers.1."))


def _fp8_experts(stack: Tensor, *, transposed: bool) -> Tensor:
    """Return matrices [E, O, I] under grids of 16 x 16, multiplied out; the third expert's grid is turned if asked."""
    found = []
    for number, matrix in enumerate(stack.float()):
        linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False)
        linear.weight.data = matrix
        held = Fp8Linear(linear, 16, transposed=transposed and number == 3)
        found.append(held.weight.float() * held._whole(held.weight_scale_inv))
    return torch.stack(found).to(stack.dtype)


def _int8_key(value: Tensor, name: str) -> Tensor:
    codes, scale = int8_rows(value)
    return (codes.float() * scale).to(value.dtype)


HOLDS: Mapping[str, Callable[[nn.Module], None]] = {
    "plain": lambda module: None,
    "cache_no_scale": _cached(_no_scale),
    "cache_scale_of_four": _cached(_scale_of_four),
    "cache_by_key": _cached(_by_key),
    "cache_int8": _cached(_int8_key),
    "cache_from_file": _cached(_from_file),
    "cache_not_delivered": _cached(_not_delivered),
    "cache_half_delivered": _cached(_half_delivered),
    "cache_frozen": _cached(_frozen()),
    "int8": _int8,
    "int8_halved": lambda module: _int8(module, wrong="1.mlp.down_proj"),
    "fp8_blocks": _fp8_blocks,
    "fp8_transposed": lambda module: _fp8_blocks(module, wrong="1.mlp.up_proj"),
    "state_bf16": _cached(_state(torch.bfloat16)),
    "state_fp16": _cached(_state(torch.float16)),
    "state_fp8": _cached(lambda value, name: fp8(value, 1.0) if name.endswith("state") else value),
}
