"""Places in a model by build. Knows modules and how taps name them; must not know any fault."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import nn

from harness.adapters.structure import discover
from harness.faults.catalogue import NoPlace

Part = Any
"""A module of a model: its attributes are the model's own, which no type knows."""


class Parts:
    """Places in a model, by build. Each raises NoPlace where the model has no such place."""

    def __init__(self, module: Part) -> None:
        self.module = module
        lists = [(p, list(m)) for p, m in module.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
        mixing = [(p, m) for p, m in lists if child_with(m[0], "attn") is not None]
        decoders = [m for p, m in mixing if not re.search("vis", p)]
        towers = [m for p, m in mixing if re.search("vis", p)]
        if not decoders:
            raise NoPlace("this module has no list of layers")
        self.layers = max(decoders, key=len)
        self.blocks = towers[0] if towers else []
        self.tower: Part = next((m for p, m in module.named_modules() if re.search(r"vis[^.]*$", p)), None)
        self._names: dict[str, str] | None = None

    # --- names ---

    def tap(self, part: Part, below: str = "") -> str:
        """Return the name of the tap of a part (of the nearest part around it that has one), or of a place below."""
        if self._names is None:
            self._names = discover(self.module).names
        path = self.path(part)
        while path and path not in self._names:
            path = path.rpartition(".")[0]
        return f"{self._names.get(path, '')}{below}"

    def path(self, part: Part) -> str:
        """Return the module's own path of a part."""
        return next(str(p) for p, m in self.module.named_modules() if m is part)

    def weight(self, part: Part, leaf: str = "weight") -> str:
        """Return the name that the module gives to a parameter of a part."""
        return f"{self.path(part)}.{leaf}"

    # --- places ---

    def layer(self, has: Callable[[Part], Any] = bool) -> Part:
        """Return a middle layer that has something: the second one if it does, else the next."""
        found = [m for m in (*self.layers[1:], self.layers[0]) if _has(has, m)]
        if not found:
            raise NoPlace("this model has no place for the fault")
        return found[0]

    def attention(self, has: Callable[[Part], Any] = bool) -> Part:
        """Return the attention of a middle layer that has something."""
        return attention_of(self.layer(lambda m: has(attention_of(m))))

    def softmax_attention(self) -> Part:
        """Return a middle attention with a softmax over keys (not a recurrent one)."""
        return self.attention(lambda m: hasattr(m, "scaling"))

    def router(self) -> Part:
        """Return the router of a middle layer."""
        return router_of(self.layer(router_of))

    def experts(self) -> Part:
        """Return the routed experts of a middle layer."""
        return find(self.layer(lambda m: find(m, r"experts$", shared=False)), r"experts$", shared=False)

    def feed_forward(self) -> Part:
        """Return what follows the attention of a middle layer: a mixture of experts or a dense block."""
        return find(self.layer(), r"^(mlp|moe|feed_forward|block_sparse_moe|ffn)$")

    def indexer(self) -> Part:
        """Return the indexer of a middle layer."""
        return find(self.layer(lambda m: find(m, r"indexer$")), r"indexer$")

    def rotary(self) -> Part:
        """Return the module that makes the decoder's rotary tables."""
        for path, part in self.module.named_modules():
            if re.search(r"rotary", path) and "vis" not in path:
                return part
        raise NoPlace("this model has no rotary table")

    def recurrent(self) -> tuple[int, Part]:
        """Return index and mixer of a middle layer that keeps a state instead of keys."""
        mixer = self.attention(
            lambda m: not hasattr(m, "scaling") and any("conv" in name for name, _ in m.named_modules())
        )
        return next(i for i, layer in enumerate(self.layers) if attention_of(layer) is mixer), mixer

    def head(self) -> Part:
        """Return the matrix that makes the logits."""
        head = self.module.get_output_embeddings()
        if head is None:
            raise NoPlace("this model has no head of its own")
        return head


def _has(has: Callable[[Part], Any], module: nn.Module) -> bool:
    try:
        found = has(module)
    except NoPlace:
        return False
    return found is not None and found is not False


def child_with(module: Part, word: str) -> Part | None:
    """Return the first child whose name holds a word and which holds matrices, or None."""
    for name, child in module.named_children():
        if word in name and sum(1 for m in child.modules() if isinstance(m, nn.Linear)) >= 2:
            return child
    return None


def attention_of(layer: Part) -> Part:
    """Return what mixes tokens in a layer."""
    found = child_with(layer, "attn")
    if found is None:
        raise NoPlace("this layer has no attention")
    return found


def find(module: Part, pattern: str, *, shared: bool = True) -> Part:
    """Return the first part whose path matches, outside of shared experts if asked. Raises NoPlace without one."""
    for path, part in module.named_modules():
        if re.search(pattern, path) and (shared or "shared" not in path):
            return part
    raise NoPlace(f"nothing here is called {pattern}")


def router_of(layer: Part) -> Part:
    """Return what chooses experts in a layer. Raises NoPlace without one."""
    for path, part in layer.named_modules():
        if re.search(r"(gate|router)$", path) and hasattr(part, "top_k"):
            return part
    raise NoPlace("this layer has no router")


def out_projection(attention: Part) -> Part:
    """Return the last matrix of an attention."""
    return find(attention, r"^(o_proj|out_proj|proj)$")


def find_or_none(module: Part, pattern: str) -> Part | None:
    """Return the first part whose path matches, or None."""
    return next((m for p, m in module.named_modules() if re.search(pattern, p)), None)
