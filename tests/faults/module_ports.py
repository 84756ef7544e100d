"""Ports that are wrong in one known way: a transformers model, or the built-in port, with one fault. Knows both by build.

    tests/faults/module_ports.py:port?fault=NAME      tests/faults/module_ports.py:builtin?fault=NAME

Every fault sits in one middle layer (or one place of the whole), found by how modules are built. Weights stay as they
are in the checkpoint, so a check of weights cannot see it. A fault that a model has no place for raises ValueError.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Fault = Callable[["Parts"], None]
FAULTS: dict[str, Fault] = {}
BENIGN: dict[str, Fault] = {}


def port(checkpoint: Path, setup: Any) -> nn.Module:
    """Load a transformers model in the setup's precision, with the fault (or benign change) that an option names."""
    from transformers import AutoConfig

    from harness.adapters.hf import _auto

    import transformers  # isort: skip

    config = AutoConfig.from_pretrained(checkpoint)
    given = {"attn_implementation": setup.options.get("attn", "eager")}
    if "experts" in setup.options:
        given["experts_implementation"] = setup.options["experts"]
    module = _auto(transformers, config).from_pretrained(checkpoint, dtype=getattr(torch, setup.dtype), **given).eval()
    for key, table in (("fault", FAULTS), ("benign", BENIGN)):
        if key in setup.options:
            table[setup.options[key]](Parts(module))
    return module


def fault(run: Fault) -> Fault:
    """Add a fault to the table under its function's name."""
    FAULTS[run.__name__] = run
    return run


def benign(run: Fault) -> Fault:
    """Add a harmless change to the table under its function's name."""
    BENIGN[run.__name__] = run
    return run


class Parts:
    """Places in a model, by build. Each raises ValueError where the model has no such place."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        lists = {p: m for p, m in module.named_modules() if isinstance(m, nn.ModuleList)}
        decoders = [m for p, m in lists.items() if not re.search("vis", p) and _child(m[0], "attn") is not None]
        towers = [m for p, m in lists.items() if re.search("vis", p) and _child(m[0], "attn") is not None]
        self.layers = list(max(decoders, key=len))
        self.blocks = list(towers[0]) if towers else []
        self.tower = next((m for p, m in module.named_modules() if re.search(r"vis[^.]*$", p)), None)

    def layer(self, has: Callable[[nn.Module], Any] = bool) -> nn.Module:
        """Return a middle layer that has something: the second one if it does, else the next."""
        found = [m for m in (*self.layers[1:], self.layers[0]) if _has(has, m)]
        if not found:
            raise ValueError("this model has no place for the fault")
        return found[0]

    def attention(self, has: Callable[[nn.Module], Any] = bool) -> nn.Module:
        """Return the attention of a middle layer that has something."""
        return attention_of(self.layer(lambda m: has(attention_of(m))))

    def router(self) -> nn.Module:
        """Return the router of a middle layer."""
        return _router(self.layer(_router))

    def experts(self) -> nn.Module:
        """Return the routed experts of a middle layer."""
        return _found(self.layer(lambda m: _found(m, r"experts$", shared=False)), r"experts$", shared=False)

    def indexer(self) -> nn.Module:
        """Return the indexer of a middle layer."""
        return _found(self.layer(lambda m: _found(m, r"indexer$")), r"indexer$")

    def rotary(self) -> nn.Module:
        """Return the module that makes the decoder's rotary tables."""
        for path, part in self.module.named_modules():
            if re.search(r"rotary", path) and "vis" not in path:
                return part
        raise ValueError("this model has no rotary table")


def _has(has: Callable[[nn.Module], Any], module: nn.Module) -> bool:
    try:
        found = has(module)
    except ValueError:
        return False
    return found is not None and found is not False


def _child(module: nn.Module, word: str) -> nn.Module | None:
    for name, child in module.named_children():
        if word in name and sum(1 for m in child.modules() if isinstance(m, nn.Linear)) >= 2:
            return child
    return None


def attention_of(layer: nn.Module) -> nn.Module:
    """Return what mixes tokens in a layer."""
    found = _child(layer, "attn")
    if found is None:
        raise ValueError("this layer has no attention")
    return found


def _found(module: nn.Module, pattern: str, *, shared: bool = True) -> nn.Module:
    for path, part in module.named_modules():
        if re.search(pattern, path) and (shared or "shared" not in path):
            return part
    raise ValueError(f"nothing here is called {pattern}")


def _router(layer: nn.Module) -> nn.Module:
    for path, part in layer.named_modules():
        if re.search(r"(gate|router)$", path) and hasattr(part, "top_k"):
            return part
    raise ValueError("this layer has no router")


def _out_projection(attention: nn.Module) -> nn.Module:
    return _found(attention, r"^(o_proj|out_proj|proj)$")


# --- how a fault gets in: hooks are hung before the harness hangs its own, so they lie inside the unit


def on_output(module: nn.Module, change: Callable[..., Any]) -> None:
    """Change a module's first tensor output: `change(output, inputs)`."""

    def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0], (args, kwargs)), *output[1:])
        return change(output, (args, kwargs))

    module.register_forward_hook(hook, with_kwargs=True)


def on_arguments(module: nn.Module, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a module's keyword arguments in a copy."""

    def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        kwargs = dict(kwargs)
        change(kwargs)
        return args, kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True)


def within(module: nn.Module, context: Callable[[], Any]) -> None:
    """Run a module's forward inside a context."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with context():
            return inner(*args, **kwargs)

    module.forward = forward  # type: ignore[method-assign]


class Calls(TorchFunctionMode):
    """Pass torch calls through `change(function, arguments, keywords)`, which returns NotImplemented to keep one."""

    def __init__(self, change: Callable[..., Any]) -> None:
        super().__init__()
        self.change = change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.change(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if result is NotImplemented else result


@contextmanager
def held(tensor: Tensor, value: Any) -> Iterator[None]:
    """Give a parameter another value for the time being, so that whoever looks at weights sees the right one."""
    kept = tensor.data
    tensor.data = torch.full_like(kept, value) if isinstance(value, (int, float)) else value.to(kept.dtype)
    try:
        yield
    finally:
        tensor.data = kept


def _positions(module: nn.Module) -> dict[str, Tensor]:
    """Return a box that holds the position ids of the running call."""
    box: dict[str, Tensor] = {}
    on_arguments(module, lambda kwargs: box.update(ids=kwargs["position_ids"]))
    return box


def _allowed(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _mask(attention: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change which keys a query sees, [..., T, S]."""

    def rewrite(kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.dim() < 3:
            return
        seen = change(_allowed(mask))
        kwargs["attention_mask"] = (
            seen if mask.dtype == torch.bool else torch.zeros_like(mask).masked_fill(~seen, torch.finfo(mask.dtype).min)
        )

    on_arguments(attention, rewrite)


def _cached(module: nn.Module, after: Callable[[Any], None], before: Callable[[Any], Any] = lambda c: c) -> None:
    """Look at the cache of every call of the whole model, before and after it."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        name = next((n for n in ("cache", "past_key_values") if n in kwargs), "")
        if name:
            kwargs[name] = before(kwargs[name])
        output = inner(*args, **kwargs)
        cache = getattr(output, "cache", None) or getattr(output, "past_key_values", None)
        if cache is not None:
            after(cache)
        return output

    module.forward = forward  # type: ignore[method-assign]


# --- matrices, norms, glue


@fault
def linear_scaled(parts: Parts) -> None:
    """An output projection is 1 % too large."""
    on_output(_out_projection(parts.attention()), lambda y, _: y * 1.01)


@fault
def norm_offset(parts: Parts) -> None:
    """An RMSNorm multiplies by 1 + w where the model says w (or the reverse)."""
    norm = _found(parts.layer(), r"(^|_)input_layernorm$")

    def change(y: Tensor, given: Any) -> Tensor:
        x = (given[0] or tuple(given[1].values()))[0].float()
        return (y.float() + x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).to(y.dtype)

    on_output(norm, change)


@fault
def norm_eps(parts: Parts) -> None:
    """An RMSNorm has a far larger epsilon."""
    norm = _found(parts.layer(), r"post_attention_layernorm$")
    name = next(n for n in ("variance_epsilon", "eps") if hasattr(norm, n))
    setattr(norm, name, 0.05)


@fault
def residual_scaled(parts: Parts) -> None:
    """A layer adds its input once and 2 % more."""

    def change(y: Tensor, given: Any) -> Tensor:
        x = (given[0] or (given[1].get("hidden_states"),))[0]
        return y + 0.02 * x if isinstance(x, Tensor) and x.shape == y.shape else y * 1.02

    on_output(parts.layer(), change)


@fault
def logits_scaled(parts: Parts) -> None:
    """The logits lack a scale of 1.03."""
    on_output(parts.module.get_output_embeddings(), lambda y, _: y * 1.03)


@fault
def logits_capped(parts: Parts) -> None:
    """The logits go through a soft cap that the model does not have, or miss the one it has."""
    cap = next((m for p, m in parts.module.named_modules() if "softcap" in p), None)
    if cap is not None:
        cap.forward = functools.wraps(cap.forward)(lambda x: x)  # type: ignore[method-assign]
        return
    on_output(parts.module.get_output_embeddings(), lambda y, _: 6 * torch.tanh(y / 6))


# --- attention


@fault
def rope_base(parts: Parts) -> None:
    """One layer's rotary angles come from another base."""
    rotary = parts.rotary()
    wrong = copy.deepcopy(rotary)
    for name, buffer in wrong.named_buffers():
        buffer.data = buffer.data**0.8 if "inv_freq" in name else buffer.data
    last: list[Any] = []
    rotary.register_forward_pre_hook(lambda _, a, k: last.append((a, k)), with_kwargs=True)

    def change(kwargs: dict[str, Any]) -> None:
        kwargs["position_embeddings"] = wrong(*last[-1][0], **last[-1][1])

    on_arguments(parts.attention(lambda m: hasattr(m, "scaling")), change)


@fault
def attention_scale(parts: Parts) -> None:
    """The softmax scale is 10 % off."""
    attention = parts.attention(lambda m: hasattr(m, "scaling"))
    attention.scaling = attention.scaling * 1.1


@fault
def mask_future(parts: Parts) -> None:
    """Every query sees one key of the future."""
    _mask(parts.attention(lambda m: hasattr(m, "scaling")), lambda seen: seen | seen.roll(1, -1))


@fault
def mask_top_left(parts: Parts) -> None:
    """In a chunk the causal mask is aligned with the first key, not with the last."""

    def change(seen: Tensor) -> Tensor:
        rows, keys = seen.shape[-2:]
        return seen if rows == keys else torch.ones(rows, keys, dtype=torch.bool).tril().expand_as(seen)

    _mask(parts.attention(lambda m: hasattr(m, "scaling")), change)


@fault
def window_short(parts: Parts) -> None:
    """A sliding window is one key too short."""

    def change(seen: Tensor) -> Tensor:
        first = seen.int().argmax(-1, keepdim=True)
        drop = torch.arange(seen.shape[-1]) == first
        return seen & ~(drop & (first > 0))

    _mask(parts.attention(lambda m: getattr(m, "sliding_window", None)), change)


@fault
def sinks_dropped(parts: Parts) -> None:
    """The attention sinks are not in the denominator."""
    attention = parts.attention(lambda m: _found_or_none(m, "sink") is not None or hasattr(m, "sinks"))
    if isinstance(getattr(attention, "sinks", None), nn.Parameter):
        within(attention, lambda: held(attention.sinks, -1e4))
    else:
        on_output(_found(attention, "sink"), lambda y, _: torch.full_like(y, -1e4))


def _found_or_none(module: nn.Module, pattern: str) -> nn.Module | None:
    return next((m for p, m in module.named_modules() if re.search(pattern, p)), None)


@fault
def softmax_band(parts: Parts) -> None:
    """A softmax over 41 to 64 or 129 to 192 keys has the wrong normaliser."""

    def change(func: Any, args: Any, kwargs: Any) -> Any:
        if func not in (torch.softmax, Tensor.softmax, nn.functional.softmax):
            return NotImplemented
        y = func(*args, **kwargs)
        return y * 0.97 if 40 < y.shape[-1] <= 64 or 128 < y.shape[-1] <= 192 else y

    within(parts.attention(lambda m: hasattr(m, "scaling")), lambda: Calls(change))


@fault
def beyond_128(parts: Parts) -> None:
    """Attention is wrong from position 128 on."""
    box = _positions(parts.module)

    def change(y: Tensor, _: Any) -> Tensor:
        late = (box["ids"].reshape(-1, y.shape[1])[-1] >= 128)[None, :, None]
        return torch.where(late, y * 1.08, y)

    on_output(_out_projection(parts.attention()), change)


@fault
def decode_position(parts: Parts) -> None:
    """Single steps are one position too far."""
    parts.rotary()

    def change(kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].shape[-1] == 1 and kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = kwargs["position_ids"] + 1

    on_arguments(parts.module, change)


# --- cache and state


def _state_layer(parts: Parts) -> int:
    attention = parts.attention(lambda m: any(isinstance(c, (nn.Conv1d,)) or "conv" in n for n, c in m.named_modules()))
    if hasattr(attention, "scaling"):
        raise ValueError("this model has no recurrent state")
    return next(i for i, layer in enumerate(parts.layers) if attention_of(layer) is attention)


@fault
def state_kept(parts: Parts) -> None:
    """A new request starts from the recurrent state that the one before left."""
    index = _state_layer(parts)
    left: list[Tensor] = []

    class Stale(Calls):
        pass

    attention = attention_of(parts.layers[index])
    fresh = {"now": False}

    def change(func: Any, args: Any, kwargs: Any) -> Any:
        return NotImplemented

    def before(cache: Any) -> Any:
        fresh["now"] = cache is None
        return cache

    def after(cache: Any) -> None:
        states = cache.layers[index].recurrent_states
        if fresh["now"] and left:
            for key in states:
                if states[key] is not None and left[-1].shape == states[key].shape:
                    states[key] = states[key] + left[-1]
        left[:] = [s.clone() for s in states.values() if s is not None][-1:]

    del Stale, change, attention
    _cached(parts.module, after, before)


@fault
def conv_tail(parts: Parts) -> None:
    """What the convolution keeps after a call is one token old."""
    index = _state_layer(parts)

    def after(cache: Any) -> None:
        states = cache.layers[index].conv_states
        for key, state in states.items():
            if state is not None:
                states[key] = state.roll(1, -1)

    _cached(parts.module, after)


@fault
def state_transposed(parts: Parts) -> None:
    """The recurrent state is written with key and value axes exchanged."""
    index = _state_layer(parts)

    def after(cache: Any) -> None:
        states = cache.layers[index].recurrent_states
        for key, state in states.items():
            if state is not None and state.shape[-1] == state.shape[-2]:
                states[key] = state.transpose(-1, -2).contiguous()

    _cached(parts.module, after)


@fault
def state_half(parts: Parts) -> None:
    """The recurrent state is kept in fp16 with 5 bits less."""
    index = _state_layer(parts)

    def after(cache: Any) -> None:
        states = cache.layers[index].recurrent_states
        for key, state in states.items():
            if state is not None:
                states[key] = (state.half() * 1.0).to(state.dtype)

    _cached(parts.module, after)


@fault
def kv_unscaled(parts: Parts) -> None:
    """Values are written to an fp8 cache without their scale and read with it."""
    layer = parts.layer(lambda m: hasattr(attention_of(m), "scaling"))
    index = next(i for i, m in enumerate(parts.layers) if m is layer)

    def after(cache: Any) -> None:
        entry = cache.layers[index]
        values = getattr(entry, "values", None)
        done = getattr(entry, "day0_done", 0)
        if isinstance(values, Tensor) and values.dim() == 4 and values.shape[-2] > done:
            new = values[..., done:, :]
            values[..., done:, :] = new.to(torch.float8_e4m3fn).to(new.dtype) * 0.9
            entry.day0_done = values.shape[-2]

    _cached(parts.module, after)


# --- mixtures of experts


@fault
def router_bias_ignored(parts: Parts) -> None:
    """The router's correction bias (or its bias) takes no part."""
    router = _router(
        parts.layer(lambda m: getattr(_router(m), "e_score_correction_bias", getattr(_router(m), "bias", None)))
    )
    bias = getattr(router, "e_score_correction_bias", None)
    within(router, lambda: held(bias if bias is not None else router.bias, 0.0))


@fault
def router_raw_weights(parts: Parts) -> None:
    """Routing weights are the raw logits of the chosen experts."""
    router = parts.router()

    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        logits = output[0]
        chosen = next(o for o in output if not o.is_floating_point())
        return tuple(
            logits.gather(-1, chosen[..., : o.shape[-1]]).to(o.dtype)
            if o.is_floating_point() and o is not logits and o.shape == chosen.shape
            else o
            for o in output
        )

    router.register_forward_hook(hook)


@fault
def router_weights_unnormalised(parts: Parts) -> None:
    """Routing weights are 5 % too small."""
    router = parts.router()

    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        chosen = next(o for o in output if not o.is_floating_point())
        return tuple(o * 0.95 if o.is_floating_point() and o.shape == chosen.shape else o for o in output)

    router.register_forward_hook(hook)


def _topk(module: nn.Module, change: Callable[..., Any], width: Callable[[Tensor], bool]) -> None:
    def watch(func: Any, args: Any, kwargs: Any) -> Any:
        if func not in (torch.topk, Tensor.topk) or not width(args[0]):
            return NotImplemented
        given = dict(zip(("input", "k", "dim"), args, strict=False)) | kwargs
        return change(func, given)

    within(module, lambda: Calls(watch))


@fault
def router_one_less(parts: Parts) -> None:
    """One expert less is chosen."""
    router = parts.router()
    count = router.weight.shape[0] if hasattr(router, "weight") else 8

    def change(func: Any, given: dict[str, Any]) -> Any:
        given["k"] = given["k"] - 1
        return torch.topk(**given)

    _topk(router, change, lambda x: x.shape[-1] >= count)


@fault
def topk_last_wrong(parts: Parts) -> None:
    """A top-k kernel returns 0 for the last index of the router."""
    router = parts.router()
    count = router.weight.shape[0] if hasattr(router, "weight") else 8

    def change(func: Any, given: dict[str, Any]) -> Any:
        values, indices = torch.topk(**given)
        wrong = indices.clone()
        wrong[..., -1] = 0
        return torch.return_types.topk((values, wrong))

    _topk(router, change, lambda x: x.shape[-1] >= count)


@fault
def experts_exchanged(parts: Parts) -> None:
    """Two experts lie in each other's place."""
    experts = parts.experts()
    inner = experts.forward

    @functools.wraps(inner)
    def forward(hidden: Tensor, index: Tensor, *args: Any, **kwargs: Any) -> Any:
        order = torch.arange(64)
        order[1], order[2] = 2, 1
        return inner(hidden, order[index].to(index.dtype), *args, **kwargs)

    experts.forward = forward  # type: ignore[method-assign]


@fault
def expert_scaled(parts: Parts) -> None:
    """One expert's output is 10 % too large."""
    experts = parts.experts()
    inner = experts.forward

    @functools.wraps(inner)
    def forward(hidden: Tensor, index: Tensor, weights: Tensor, *args: Any, **kwargs: Any) -> Any:
        return inner(hidden, index, torch.where(index == 3, weights * 1.1, weights), *args, **kwargs)

    experts.forward = forward  # type: ignore[method-assign]


@fault
def shared_activation(parts: Parts) -> None:
    """The shared expert (the dense MLP where there is none) has another activation."""

    def place(layer: nn.Module) -> nn.Module:
        for pattern in (r"shared_experts?$", r"mlp$"):
            found = _found_or_none(layer, pattern)
            if found is not None and hasattr(found, "act_fn"):
                return found
        raise ValueError("no activation to exchange")

    place(parts.layer(place)).act_fn = nn.GELU()


# --- sparse selection


@fault
def indexer_rope(parts: Parts) -> None:
    """The indexer rotates neighbours instead of halves."""
    indexer = parts.indexer()

    def change(kwargs: dict[str, Any]) -> None:
        if kwargs.get("position_embeddings") is None:
            raise ValueError("this indexer has no rotary table")
        kwargs["position_embeddings"] = tuple(
            t[..., : t.shape[-1] // 2].repeat_interleave(2, -1) for t in kwargs["position_embeddings"]
        )

    parts.rotary()
    _by_name(indexer)
    on_arguments(indexer, change)


def _by_name(module: nn.Module) -> None:
    """Bind positional arguments by name, so that a change finds them."""
    import inspect

    names = [n for n in inspect.signature(module.forward).parameters]

    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return (), {**dict(zip(names, args, strict=False)), **kwargs}

    module.register_forward_pre_hook(hook, with_kwargs=True)


@fault
def indexer_one_sided(parts: Parts) -> None:
    """A rotation is applied to the indexer's queries only."""
    indexer = parts.indexer()
    draw = torch.Generator().manual_seed(1)
    width = indexer.wk.weight.shape[0]
    turn = torch.linalg.qr(torch.randn(width, width, generator=draw)).Q
    on_output(
        indexer.wq_b, lambda y, _: (y.unflatten(-1, (-1, width)).float() @ turn).flatten(-2).to(y.dtype)
    )


@fault
def indexer_future(parts: Parts) -> None:
    """The indexer may choose one key of the future."""
    indexer = parts.indexer()
    _by_name(indexer)

    def change(kwargs: dict[str, Any]) -> None:
        mask = kwargs["attention_mask"]
        seen = _allowed(mask)
        seen = seen | seen.roll(1, -1)
        kwargs["attention_mask"] = (
            seen if mask.dtype == torch.bool else torch.zeros_like(mask).masked_fill(~seen, torch.finfo(mask.dtype).min)
        )

    on_arguments(indexer, change)


@fault
def indexer_weights_ignored(parts: Parts) -> None:
    """All heads of the indexer weigh the same."""
    on_output(parts.indexer().weights_proj, lambda y, _: torch.ones_like(y))


@fault
def indexer_one_less(parts: Parts) -> None:
    """One key less is chosen."""
    parts.indexer().index_topk -= 1


# --- pictures


def _grid(parts: Parts) -> dict[str, Tensor]:
    if parts.tower is None or not parts.blocks:
        raise ValueError("this model has no vision tower")
    box: dict[str, Tensor] = {}
    on_arguments(parts.module, lambda kwargs: box.update(grid=kwargs["image_grid_thw"]) if "image_grid_thw" in kwargs else None)  # fmt: skip
    return box


def _merger(parts: Parts) -> nn.Module:
    return _found(parts.tower, r"merger$")  # type: ignore[arg-type]


@fault
def pictures_swapped(parts: Parts) -> None:
    """The features of two pictures are put into each other's place."""
    box = _grid(parts)

    def change(y: Tensor, _: Any) -> Tensor:
        rows = box["grid"].prod(-1)
        if len(rows) < 2:
            return y
        rows = rows * y.shape[0] // rows.sum()
        first = int(rows[0])
        return torch.cat((y[first:], y[:first]))

    on_output(_merger(parts), change)


def _scatter(parts: Parts, change: Callable[[Tensor], Tensor]) -> None:
    """Change the mask of the place where pictures' rows go."""
    _grid(parts)

    def watch(func: Any, args: Any, kwargs: Any) -> Any:
        if func is not Tensor.masked_scatter:
            return NotImplemented
        return func(args[0], change(args[1]), *args[2:], **kwargs)

    within(parts.module, lambda: Calls(watch))


@fault
def placed_one_late(parts: Parts) -> None:
    """The rows of pictures lie one token too late."""
    _scatter(parts, lambda mask: mask.roll(1, 1))


@fault
def patches_raster(parts: Parts) -> None:
    """Patches come in raster order where the tower wants blocks that are merged."""
    box = _grid(parts)
    embed = _found(parts.tower, r"patch_embed(ding)?$|embeddings$")  # type: ignore[arg-type]

    def change(y: Tensor, _: Any) -> Tensor:
        flat, done, found = y.reshape(-1, y.shape[-1]), 0, []
        for _, height, width in box["grid"].tolist():
            n = height * width
            part = flat[done : done + n]
            blocks = torch.arange(n).reshape(height // 2, width // 2, 2, 2).permute(0, 2, 1, 3).reshape(-1)
            found.append(part[blocks])
            done += n
        if done != flat.shape[0] or any(h % 2 or w % 2 for _, h, w in box["grid"].tolist()):
            raise ValueError("this tower does not merge blocks of patches")
        return torch.cat(found).reshape(y.shape)

    on_output(embed, change)


@fault
def channels_reversed(parts: Parts) -> None:
    """Colours come in the order blue, green, red."""
    _grid(parts)

    def change(kwargs: dict[str, Any]) -> None:
        pixels = kwargs.get("pixel_values")
        if not isinstance(pixels, Tensor):
            return
        if pixels.dim() == 4 and pixels.shape[-1] == 3:
            kwargs["pixel_values"] = pixels.flip(-1)
        else:
            flat = pixels.reshape(pixels.shape[0], 3, -1)
            kwargs["pixel_values"] = flat.flip(1).reshape(pixels.shape)

    on_arguments(parts.module, change)


@fault
def pictures_attend_across(parts: Parts) -> None:
    """In one block every patch attends to the patches of all pictures."""
    _grid(parts)
    attention = attention_of(parts.blocks[-1])

    def change(kwargs: dict[str, Any]) -> None:
        lengths = kwargs["cu_seqlens"]
        kwargs["cu_seqlens"] = lengths[[0, -1]]

    on_arguments(attention, change)


@fault
def block_scaled(parts: Parts) -> None:
    """A projection in the tower is 1 % too large."""
    _grid(parts)
    on_output(_out_projection(attention_of(parts.blocks[-1])), lambda y, _: y * 1.01)


@fault
def grid_corners(parts: Parts) -> None:
    """The table of patch positions is resized with the other convention for corners."""
    _grid(parts)

    def watch(func: Any, args: Any, kwargs: Any) -> Any:
        if "align_corners" not in kwargs:
            return NotImplemented
        return func(*args, **{**kwargs, "align_corners": not kwargs["align_corners"]})

    seen: list[int] = []

    def counted(func: Any, args: Any, kwargs: Any) -> Any:
        if "align_corners" in kwargs:
            seen.append(1)
        return watch(func, args, kwargs)

    within(parts.tower, lambda: Calls(counted))  # type: ignore[arg-type]
    on_output(parts.tower, lambda y, _: y if seen else _refuse())  # type: ignore[arg-type]


def _refuse() -> Any:
    raise ValueError("this tower resizes no table")


# --- harmless


@benign
def norm_rounded_first(parts: Parts) -> None:
    """Every RMSNorm rounds before the weight instead of after it (or the reverse)."""
    for part in parts.module.modules():
        weight = getattr(part, "weight", None)
        epsilon = getattr(part, "variance_epsilon", None)
        if epsilon is None or not isinstance(weight, Tensor) or type(part).__name__.endswith("Gated"):
            continue

        def change(y: Tensor, given: Any, weight: Tensor = weight, epsilon: float = epsilon) -> Tensor:
            x = (given[0] or tuple(given[1].values()))[0].float()
            return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight.float()).to(y.dtype)

        on_output(part, change)


@benign
def softmax_then_choose(parts: Parts) -> None:
    """Routing weights come from a softmax over the chosen logits where the model normalises after a softmax."""
    for layer in parts.layers:
        try:
            router = _router(layer)
        except ValueError:
            continue
        if hasattr(router, "e_score_correction_bias") or not getattr(router, "norm_topk_prob", True):
            continue

        def hook(_: nn.Module, args: Any, output: Any) -> Any:
            logits, weights, chosen = output
            return logits, torch.softmax(logits.gather(-1, chosen).float(), -1).to(weights.dtype), chosen

        router.register_forward_hook(hook)


@benign
def batch_of_two(parts: Parts) -> None:
    """Projections run over twice as many rows."""
    for layer in parts.layers:
        for part in layer.modules():
            if isinstance(part, nn.Linear):
                inner = part.forward

                def forward(x: Tensor, inner: Any = inner) -> Tensor:
                    return inner(torch.cat((x, torch.zeros_like(x)), 0))[: x.shape[0]]

                part.forward = functools.wraps(inner)(forward)  # type: ignore[method-assign]


@benign
def sums_split(parts: Parts) -> None:
    """Output projections add two halves, each rounded, as two cards would."""
    for layer in parts.layers:
        for path, part in layer.named_modules():
            if isinstance(part, nn.Linear) and re.search(r"(o_proj|out_proj|down_proj)$", path):

                def forward(x: Tensor, part: nn.Linear = part) -> Tensor:
                    half = x.shape[-1] // 2
                    first = nn.functional.linear(x[..., :half], part.weight[:, :half])
                    return first + nn.functional.linear(x[..., half:], part.weight[:, half:], part.bias)

                part.forward = functools.wraps(part.forward)(forward)  # type: ignore[method-assign]


@benign
def wide_projections(parts: Parts) -> None:
    """Projections run in float32 and round once."""
    for layer in parts.layers:
        for part in layer.modules():
            if isinstance(part, nn.Linear):

                def forward(x: Tensor, part: nn.Linear = part) -> Tensor:
                    bias = None if part.bias is None else part.bias.float()
                    return nn.functional.linear(x.float(), part.weight.float(), bias).to(x.dtype)

                part.forward = functools.wraps(part.forward)(forward)  # type: ignore[method-assign]


@benign
def mkldnn_off(parts: Parts) -> None:
    """Products come from another library."""
    torch.backends.mkldnn.enabled = False


@benign
def one_thread(parts: Parts) -> None:
    """One thread instead of several."""
    torch.set_num_threads(1)
