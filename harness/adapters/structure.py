"""Names the parts of a module tree by what they are built of. Knows torch modules; must not know model classes.

A decoder is the longest list of modules that hold attention; a router is a matrix with one row per expert beside a set
of experts; a norm has nothing but vectors. Names help only where the build says nothing (`shared`, `index`, `merger`).
What is not recognised keeps its own name below its canonical parent.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

_VISION = re.compile(r"(^|[._])(vision|visual|vit|image|siglip|vpm)", re.IGNORECASE)
_OTHER_TOWER = re.compile(r"(^|[._])(audio|speech|mtp|nextn|draft)", re.IGNORECASE)
_ATTENTION_ARGUMENTS = frozenset(
    {"attention_mask", "position_embeddings", "past_key_values", "past_key_value", "cache", "cu_seqlens", "layer_past"}
)
_ATTENTION_PARTS = re.compile(r"^(q|k|v|o|kv|qkv|query|key|value|out|in|c_attn|w[qkvo])(_|$|\d)|attn", re.IGNORECASE)
_OUTPUT_PROJECTION = re.compile(r"^(o_proj|out_proj|o|wo|dense|c_proj|proj|to_out|output)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What was found. `names` maps the module's own paths to canonical ones, for every module worth a tap.

    `layers` and `blocks` are own paths of the decoder layers and vision blocks; `backbone` the own path of what is fed
    the embedded sequence; `cores` own paths of output projections, whose input is an attention's core.
    """

    names: dict[str, str]
    layers: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    backbone: str = ""
    embedding: str = ""
    head: str = ""
    vision: str = ""
    cores: frozenset[str] = frozenset()


def discover(module: nn.Module) -> Structure:
    """Find the parts of a model that is called with token ids, and name them as in `harness.taps`."""
    modules = dict(module.named_modules())
    decoder = _longest_list(modules, vision=False)
    tower_list = _longest_list(modules, vision=True)
    backbone = decoder.rpartition(".")[0] if decoder is not None else ""
    vision = _vision_root(tower_list) if tower_list is not None else ""
    embedding = _embedding(module, modules)
    head = _head(module, modules)
    renamed: dict[str, str] = {}
    if decoder is not None:
        renamed[decoder] = "layers"
        _name_layers(modules, decoder, "layers", renamed)
        norms = [p for p in _children(modules, backbone) if is_norm(modules[p])]
        if norms:
            renamed[norms[-1]] = "norm"
    if tower_list is not None:
        _name_tower(modules, vision, tower_list, renamed)
    if embedding:
        renamed[embedding] = "embed"
    if head:
        renamed[head] = "lm_head"
    if backbone:
        renamed[backbone] = ""
    skipped = _shared(module) | _data_dependent(modules) | _wrappers(modules, backbone, vision, decoder, tower_list)
    names = {
        path: _canonical(path, renamed)
        for path in modules
        if path and path not in skipped and not isinstance(modules[path], (nn.ModuleList, nn.ModuleDict, nn.Identity))
    }
    return Structure(
        names=names,
        layers=tuple(f"{decoder}.{i}" for i in range(len(list(modules[decoder].children())))) if decoder else (),
        blocks=tuple(f"{tower_list}.{i}" for i in range(len(list(modules[tower_list].children()))))
        if tower_list
        else (),
        backbone=backbone,
        embedding=embedding,
        head=head,
        vision=vision,
        cores=frozenset(p for p in names if _is_core(p, modules)),
    )


def is_norm(module: nn.Module) -> bool:
    """Say whether a module holds vectors only: a norm with a weight, perhaps a bias."""
    own = list(module.parameters())
    return not list(module.children()) and bool(own) and all(p.dim() == 1 for p in own)


def is_attention(module: nn.Module) -> bool:
    """Say whether a module mixes tokens: several matrices, and arguments or parts that only attention has."""
    if _matrices(module) < 2:
        return False
    arguments = set(inspect.signature(module.forward).parameters)
    parts = [name for name, _ in module.named_children() if _ATTENTION_PARTS.search(name)]
    return len(parts) >= 2 or bool(arguments & _ATTENTION_ARGUMENTS and parts)


def experts_of(module: nn.Module) -> str | None:
    """Return the name of the child that holds a set of experts (a list, or matrices stacked in 3-D), or None.

    A set of n experts has a router beside it: a matrix with n rows.
    """
    for name, child in module.named_children():
        count = 0 if "shared" in name else _expert_count(child)
        own = any(p.dim() == 2 and p.shape[0] == count for p in module.parameters(recurse=False))
        if count >= 2 and (own or "expert" in name or router_of(module, name) is not None):
            return name
    return None


def router_of(module: nn.Module, experts: str) -> str | None:
    """Return the name of the child that chooses among the experts of another child, or None."""
    children = dict(module.named_children())
    count = _expert_count(children[experts])
    found = [
        name
        for name, child in children.items()
        if name != experts and "shared" not in name
        if any(p.dim() == 2 and p.shape[0] == count for p in child.parameters())
    ]
    return next((name for name in found if re.search(r"router|gate", name)), found[0] if found else None)


def _expert_count(child: nn.Module) -> int:
    if isinstance(child, nn.ModuleList):
        return len(child) if len(child) and _matrices(child[0]) else 0
    if isinstance(child, _ConvNd):
        return 0
    return max((p.shape[0] for p in child.parameters(recurse=False) if p.dim() == 3), default=0)


def _matrices(module: nn.Module) -> int:
    return sum(1 for m in module.modules() if any(p.dim() == 2 for p in m.parameters(recurse=False)))


def _longest_list(modules: dict[str, nn.Module], *, vision: bool) -> str | None:
    """Return the path of the longest module list whose members hold attention, in or outside a vision tower."""
    best, length = None, 0
    for path, module in modules.items():
        if not isinstance(module, nn.ModuleList) or _OTHER_TOWER.search(path) or bool(_VISION.search(path)) != vision:
            continue
        if any(is_attention(child) for layer in module for child in layer.children()) and len(module) > length:
            best, length = path, len(module)
    return best


def _vision_root(blocks: str) -> str:
    """Return the outermost part of a path that names the tower."""
    parts = blocks.split(".")
    for i, part in enumerate(parts):
        if _VISION.search(part):
            return ".".join(parts[: i + 1])
    return blocks.rpartition(".")[0]


def _embedding(module: nn.Module, modules: dict[str, nn.Module]) -> str:
    getter = getattr(module, "get_input_embeddings", None)
    found = None
    if callable(getter):
        try:
            found = getter()
        except (NotImplementedError, AttributeError):
            found = None
    tables = [
        (m.weight.shape[0], p) for p, m in modules.items() if isinstance(m, nn.Embedding) and not _VISION.search(p)
    ]
    fallback = max(tables, default=(0, ""), key=lambda t: t[0])[1]
    return next((p for p, m in modules.items() if m is found), fallback) if found is not None else fallback


def _head(module: nn.Module, modules: dict[str, nn.Module]) -> str:
    getter = getattr(module, "get_output_embeddings", None)
    found = getter() if callable(getter) else None
    if found is not None:
        return next((p for p, m in modules.items() if m is found), "")
    return next((p for p in ("lm_head", "head", "output", "unembed") if isinstance(modules.get(p), nn.Linear)), "")


def _children(modules: dict[str, nn.Module], path: str) -> list[str]:
    return [f"{path}.{name}" if path else name for name, _ in modules[path].named_children()]


def _name_layers(modules: dict[str, nn.Module], container: str, canonical: str, renamed: dict[str, str]) -> None:
    """Name the layers of a list, their children and the parts of those."""
    for index, path in enumerate(_children(modules, container)):
        renamed[path] = f"{canonical}.{index}"
        taken: set[str] = set()
        children = _children(modules, path)
        for child in children:
            role = _role(modules[child])
            if role and role not in taken:
                taken.add(role)
                renamed[child] = f"{canonical}.{index}.{role}"
                _name_parts(modules, child, role, renamed)
        norms = [c for c in children if is_norm(modules[c])]
        for name, norm in zip(_norm_names(norms), norms, strict=True):
            if name:
                renamed[norm] = f"{canonical}.{index}.{name}"


def _role(module: nn.Module) -> str:
    if experts_of(module) is not None:
        return "moe"
    if is_attention(module):
        return "attn"
    return "mlp" if _matrices(module) >= 2 else ""


def _norm_names(paths: list[str]) -> list[str]:
    """Name the norms of a layer: by order where there are one or two, by their own words where there are more."""
    if len(paths) <= 2:
        return ["input_norm", "post_attn_norm"][: len(paths)]
    leaves = [p.rsplit(".", 1)[-1] for p in paths]
    known = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_attn_norm"}
    return [known.get(leaf, "") for leaf in leaves]


def _name_parts(modules: dict[str, nn.Module], path: str, role: str, renamed: dict[str, str]) -> None:
    """Name the parts of an attention (its indexer) or of a mixture of experts (router, experts, shared expert)."""
    base = renamed[path]
    for child in _children(modules, path):
        leaf = child.rsplit(".", 1)[-1]
        if role == "attn" and "index" in leaf and _matrices(modules[child]) >= 1:
            renamed[child] = f"{base}.indexer"
        elif role == "moe":
            experts = experts_of(modules[path]) or ""
            if leaf == experts:
                renamed[child] = f"{base}.experts"
            elif "shared" in leaf and _matrices(modules[child]) >= 2:
                renamed[child] = f"{base}.shared_expert"
            elif leaf == router_of(modules[path], experts):
                renamed[child] = f"{base}.router"


def _name_tower(modules: dict[str, nn.Module], root: str, blocks: str, renamed: dict[str, str]) -> None:
    """Name the vision tower: patch embedding, blocks, final norm, merger; wrappers inside the tower vanish."""
    renamed[root] = "vision"
    inner = blocks.rpartition(".")[0]
    if inner != root and inner.startswith(root):
        renamed[inner] = "vision"
    renamed[blocks] = "vision.blocks"
    _name_layers(modules, blocks, "vision.blocks", renamed)
    for child in _children(modules, inner if inner in modules else root):
        leaf = child.rsplit(".", 1)[-1]
        if re.search(r"merg|project|connector", leaf) and not isinstance(modules[child], nn.ModuleList):
            renamed[child] = "vision.merger"
        elif child != blocks and (re.search(r"patch|^embed", leaf)) and _holds_matrix(modules[child]):
            renamed.setdefault(child, "vision.patch_embed")
        elif is_norm(modules[child]) and re.search(r"^norm$|post|final|last", leaf):
            renamed[child] = "vision.norm"
    for path in modules:
        if "." not in path.replace(root.rpartition(".")[0] + ".", "", 1) and re.search(
            r"merger|multi_modal_proj", path
        ):
            renamed.setdefault(path, "vision.merger")


def _holds_matrix(module: nn.Module) -> bool:
    return any(p.dim() >= 2 for p in module.parameters())


def _shared(module: nn.Module) -> set[str]:
    """Return modules that are reachable by several paths: one name cannot stand for all their calls."""
    paths: dict[int, list[str]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        paths.setdefault(id(part), []).append(path)
    return {path for found in paths.values() if len(found) > 1 for path in found}


def _data_dependent(modules: dict[str, nn.Module]) -> set[str]:
    """Return what lies inside a set of experts: it is called with the tokens that came its way, if at all."""
    inside: set[str] = set()
    for path, module in modules.items():
        name = experts_of(module) if path else None
        if name is not None:
            experts = f"{path}.{name}"
            inside |= {p for p in modules if p.startswith(experts + ".")}
    return inside


def _wrappers(modules: dict[str, nn.Module], *anchors: str | None) -> set[str]:
    """Return the ancestors of the lists, which only pass on what their last part gave, and the tower's own root."""
    found: set[str] = set()
    for anchor in anchors:
        parts = anchor.split(".") if anchor else []
        found |= {".".join(parts[:i]) for i in range(1, len(parts) + 1)}
    return found


def _canonical(path: str, renamed: dict[str, str]) -> str:
    """Return the canonical name of a path: that of its nearest named ancestor, then its own words."""
    parts = path.split(".")
    for i in range(len(parts), 0, -1):
        head = renamed.get(".".join(parts[:i]))
        if head is not None:
            return ".".join([*([head] if head else []), *parts[i:]])
    return path


def _is_core(path: str, modules: dict[str, nn.Module]) -> bool:
    parent, _, leaf = path.rpartition(".")
    if not _OUTPUT_PROJECTION.match(leaf) or parent not in modules or not is_attention(modules[parent]):
        return False
    return any(isinstance(p, torch.Tensor) and p.dim() == 2 for p in modules[path].parameters())
