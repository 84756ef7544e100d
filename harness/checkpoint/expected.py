"""Say which tensors a checkpoint should hold and does not. Knows families of names and configurations; no formats.

No architecture is known by name. A layer is held against its siblings: a tensor that a set of layers holds is either
held by all, or by a set that the configuration gives, that repeats, or that other tensors complete (dense and sparse,
linear and full). What is left over is missing. Experts are held against their count and against each other.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.checkpoint.container import Checkpoint
from harness.checkpoint.header import Problem
from harness.checkpoint.names import Family, families, joined, number, text_config, tower

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
DEPTHS = ("num_hidden_layers", "depth", "num_layers", "n_layers", "layers", "encoder_layers", "vision_layers")
_EXPERTS = re.compile(r"^(n|num)_(routed_|local_|moe_)?experts$|^moe_num_experts$|^num_experts_routed$")
_MTP_WORDS = re.compile(r"(^|\.)(eh_proj|enorm|hnorm|shared_head|embed_proj|h_proj|e_proj|mtp\w*|nextn\w*)(\.|$)")
_ROUTER = re.compile(r"(^|\.)(gate|router)\.weight$")
_MAX_NAMED = 50
_MAX_EXPERTS = 1 << 20


def expected_problems(checkpoint: Checkpoint) -> list[Problem]:
    """List the tensors, layers and experts that structure and configuration promise and the checkpoint does not hold.

    Judged from names alone. Of one kind in one stack at most fifty are named; the last of them says how many there are.
    """
    config = text_config(checkpoint.config)
    stacks: dict[str, list[Family]] = defaultdict(list)
    for family in families(checkpoint):
        if family.stack:
            stacks[family.stack].append(family)
    main = main_stack(stacks)
    found: list[Problem] = []
    for stack, members in stacks.items():
        if stack != main and not is_stack(members):
            continue
        inner = config if stack == main else _sub_config(checkpoint.config, stack, stacks)
        found += _capped(_count(stack, members, inner, main=stack == main))
        found += _capped(_layers(checkpoint, stack, members, inner))
        found += _capped(_experts(checkpoint, members, inner))
    return found


def main_stack(stacks: Mapping[str, Sequence[Family]]) -> str:
    """Return the stack of the text model: the one with most names outside vision, audio and MTP; empty if none."""
    text = {s: f for s, f in stacks.items() if tower(s) == "text" and "encoder" not in s}
    deep = {s: f for s, f in text.items() if is_stack(f)}
    few = {s: f for s, f in text.items() if s.rsplit(".", 1)[-1] in ("layers", "h", "blocks", "layer")}
    candidates = deep or few
    return max(candidates, key=lambda s: sum(len(f.members) for f in candidates[s]), default="")


def is_stack(members: Sequence[Family]) -> bool:
    """Tell a stack of layers from a numbered list of a few parts: many layers hold many tensors in several modules."""
    layers = _layers_of(members)
    shared = [f for f in members if {n[0] for n in f.members} >= layers]
    return len(layers) >= 4 and len(shared) >= 6 and len({f.leaf.split(".")[0] for f in shared}) >= 2


def _sub_config(config: Mapping[str, Any], stack: str, stacks: Mapping[str, Sequence[Family]]) -> dict[str, Any]:
    """Return the configuration of the largest stack of another tower, where there is exactly one of its kind."""
    kind = tower(stack)
    keys = [k for k, v in config.items() if isinstance(v, dict) and k.endswith("_config") and tower(k) == kind]
    rivals = [s for s, members in stacks.items() if tower(s) == kind and is_stack(members)]
    return dict(config[keys[0]]) if len(keys) == 1 and len(rivals) == 1 and kind in ("vision", "audio") else {}


def _capped(problems: Iterator[Problem]) -> list[Problem]:
    found: dict[str, list[Problem]] = defaultdict(list)
    count: Counter[str] = Counter()
    for problem in problems:
        count[problem.kind] += 1
        if len(found[problem.kind]) < _MAX_NAMED:
            found[problem.kind].append(problem)
    return [p for kind in found for p in found[kind]] + [
        Problem(kind=kind, name=found[kind][-1].name, file="", expected="no more of these", found=f"{n} in all")
        for kind, n in count.items() if n > _MAX_NAMED
    ]  # fmt: skip


def _layers_of(members: Sequence[Family]) -> set[int]:
    return {numbers[0] for family in members for numbers in family.members}


def _count(stack: str, members: Sequence[Family], config: Mapping[str, Any], *, main: bool) -> Iterator[Problem]:
    """Hold the number of layers against the configuration, and look for gaps."""
    held = _layers_of(members)
    top, said = max(held), number(config, *(LAYERS if main else DEPTHS))
    n = min(said, top + 1) if main and said is not None else top + 1
    gaps = sorted(set(range(n)) - held) if top < 100_000 else []
    if main or len(gaps) * 10 <= n:
        for layer in gaps:
            yield _problem("missing_layer", f"{stack}.{layer}", f"layers 0 to {n - 1}", f"no tensor of layer {layer}")
    if said is None:
        return
    expected = f"{said} layers, as the configuration says"
    if top + 1 < said:
        # Layers that are passed several times share their weights: half the layers may be all of them.
        meant = not main or said % (top + 1) == 0
        yield _problem("layer_count", stack, expected, f"{top + 1}", "warning" if meant else "error")
    extra = sorted(layer for layer in held if layer >= said)
    if extra and main:
        yield _extra(config, stack, members, extra, said)
    elif extra and len(extra) > 1:
        yield _problem("layer_count", stack, expected, f"{top + 1}", "warning")


def _extra(
    config: Mapping[str, Any], stack: str, members: Sequence[Family], extra: Sequence[int], said: int
) -> Problem:
    """Judge layers beyond the configured ones: further tokens are predicted there, or they are too many."""
    promised = number(config, "num_nextn_predict_layers", "num_mtp_layers", "mtp_num_layers", "num_mtp_modules") or 0
    own = {f.leaf for f in members if all(numbers[0] >= said for numbers in f.members)}
    name, found = f"{stack}.{extra[0]}", f"{len(extra)} more"
    if len(extra) <= promised or any(_MTP_WORDS.search(leaf) for leaf in own):
        return _problem("extra_layer", name, f"{said} layers", f"{found}: they predict further tokens", "note")
    return _problem("layer_count", name, f"{said} layers, as the configuration says", found)


# --- siblings ---


def _layers(
    checkpoint: Checkpoint, stack: str, members: Sequence[Family], config: Mapping[str, Any]
) -> Iterator[Problem]:
    """Hold each layer against its siblings, leaf by leaf."""
    said = number(config, *LAYERS)
    everything = frozenset(n for n in _layers_of(members) if said is None or n < said)
    if len(everything) < 3:
        return
    where = {f: frozenset(numbers[0] for numbers in f.members) & everything for f in members}
    sets = Counter(s for s in where.values() if s)
    usual = _usual(sets, everything, config)
    lost: set[int] = set()
    odd: list[tuple[Family, frozenset[int]]] = []
    for family, held in where.items():
        if not held or held in usual:
            continue
        base = min((u for u in usual if held < u and len(held) * 2 >= len(u)), key=len, default=None)
        if base is None:
            odd.append((family, held))
            continue
        module, beside = family.leaf.rsplit(".", 1)[0], set[int]()
        for other, theirs in where.items():
            if other is not family and other.leaf.rsplit(".", 1)[0] == module:
                beside |= theirs
        lost |= base - held
        for layer in sorted(base - held):
            meant = _regular(held, everything) and (layer not in beside or len(base - held) == 1)
            name = joined(family.template, [layer])
            found = f"none, where {len(held)} other layers of this kind hold one"
            yield _problem("missing_tensor", name, "a tensor", found, "warning" if meant else "error")
    for family, held in odd:
        if len(held) * 4 <= len(everything) or len(held) == 1:
            yield from _odd(checkpoint, family, held, everything, lost)


def _odd(
    checkpoint: Checkpoint, family: Family, held: frozenset[int], everything: frozenset[int], lost: set[int]
) -> Iterator[Problem]:
    """Name a tensor that only this layer holds; one beside a missing one is that one under another name, perhaps."""
    for layer in sorted(held):
        name = joined(family.template, [layer])
        logical = next(x for numbers, x in family.members.items() if numbers[0] == layer)
        ref = checkpoint.tensors[next(iter(logical.parts.values()))]
        found, severity = f"one that {len(everything) - len(held)} siblings have not", "note"
        if layer in lost:
            found, severity = found + ", in a layer that lacks another", "error"
        yield _problem("odd_tensor", name, "only what siblings hold", found, severity, file=ref.file, offset=ref.begin)


def _usual(sets: Counter[frozenset[int]], everything: frozenset[int], config: Mapping[str, Any]) -> set[frozenset[int]]:
    """Return the sets of layers that need no explanation: all, those that the configuration gives, those that repeat,
    and those that another set completes."""
    usual = {everything}
    features = _features(config, everything)
    for held in sets:
        if held in features or everything - held in features or _periodic(held, everything):
            usual.add(held)
        elif _complete_each_other(held, everything - held, sets, everything):
            usual.update((held, everything - held))
    for held in sets:  # dense, sparse and linear, full cross: what both say of a layer is a set of its own
        if held not in usual and any(held == a & b for a in usual for b in (*usual, *features) if held < a):
            usual.add(held)
    return usual


def _complete_each_other(
    held: frozenset[int], rest: frozenset[int], sets: Mapping[frozenset[int], int], everything: frozenset[int]
) -> bool:
    """Say whether two kinds of layer share the stack; one tensor under another name in one layer is no kind."""
    fewer = min(held, rest, key=len)
    several = len(fewer) >= 2 or _regular(fewer, everything)
    return several and sets.get(held, 0) >= 2 and sets.get(rest, 0) >= 2


def _periodic(held: frozenset[int], everything: frozenset[int]) -> bool:
    """Say whether a set of layers repeats with a period, at least three times."""
    low, high = min(everything), max(everything)
    for period in range(2, min(12, (high - low + 1) // 3) + 1):
        phases = {(n - low) % period for n in held}
        if len(phases) < period and held == {n for n in everything if (n - low) % period in phases}:
            return True
    return False


def _regular(held: frozenset[int], everything: frozenset[int]) -> bool:
    """Say whether a set is a run from the first layer or to the last: such sets can be meant."""
    ordered = sorted(everything)
    return held in (frozenset(ordered[: len(held)]), frozenset(ordered[len(ordered) - len(held) :]))


def _features(config: Mapping[str, Any], everything: frozenset[int]) -> set[frozenset[int]]:
    """Return the sets of layers that a configuration's lists and numbers give."""
    found: set[frozenset[int]] = set()
    size, edges = max(everything) + 1, set[int]()
    for key, value in _entries(config):
        if isinstance(value, list):
            found |= _listed(value, size, everything)
        elif isinstance(value, int) and not isinstance(value, bool) and 0 < value < size:
            if re.search(r"first|dense|start|shared|share|last|hash|num_\w*layers$|skip", key):
                found |= {frozenset(n for n in everything if n < value)}
                found |= {frozenset(n for n in everything if n < size - value)}
            if re.search(r"layer|start|begin|end", key):
                edges.add(value)
            if re.search(r"freq|interval|step|every|period|pattern|rate", key):
                for phase in range(value):
                    found |= {frozenset(n for n in everything if n % value == phase)}
    if len(edges) <= 12:
        found |= {frozenset(n for n in everything if a <= n < b) for a in edges for b in edges if a < b}
    return found


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and not key.endswith("_config"):
            yield from ((k, v) for k, v in value.items() if not isinstance(v, dict))
        elif isinstance(value, dict) and re.search(r"attn|attention|ssm|moe|mamba|linear", key):
            yield from value.items()
        else:
            yield key, value


def _listed(value: list[Any], size: int, everything: frozenset[int]) -> set[frozenset[int]]:
    found = set()
    if len(value) >= size and len(value) <= size + 8:
        kinds = defaultdict(set)
        for layer in everything:
            kinds[repr(value[layer])[:200]].add(layer)
        names = list(kinds.values())
        found |= {frozenset(s) for s in names}
        if len(names) <= 6:  # a tensor may be held by several of the named kinds
            for mask in range(1, 1 << len(names)):
                found.add(frozenset().union(*(names[i] for i in range(len(names)) if mask >> i & 1)))
    elif value and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        for base in (0, 1):
            found.add(frozenset(v - base for v in value) & everything)
    elif 1 < len(value) < size:  # a pattern that repeats
        for kind in {repr(v)[:200] for v in value}:
            found.add(frozenset(n for n in everything if repr(value[n % len(value)])[:200] == kind))
    return {s for s in found if s}


# --- experts ---


def expert_count(config: Mapping[str, Any]) -> int | None:
    """Return the number of routed experts that a configuration gives; None if none, or by layer."""
    inner = config.get("ffn_config") or config.get("moe_config") or config.get("moe")
    counts: set[int] = set()
    for owner in (config, inner if isinstance(inner, dict) else {}):
        said = {number(owner, k) for k in owner if _EXPERTS.match(k)}
        counts = counts or {n for n in said if n is not None and n <= _MAX_EXPERTS}
    return counts.pop() if len(counts) == 1 else None


def _experts(checkpoint: Checkpoint, members: Sequence[Family], config: Mapping[str, Any]) -> Iterator[Problem]:
    """Hold numbered lists within layers against each other, and experts against their configured count."""
    lists: dict[str, list[Family]] = defaultdict(list)
    for family in members:
        if family.template.count("#") == 2:
            lists[family.template[: family.template.rfind("#")]].append(family)
    count = expert_count(config)
    for container, leaves in lists.items():
        routed = re.search(r"(^|\.)(\w*_)?experts\.#?\.?$", container) is not None and "shared" not in container
        held: dict[int, list[set[int]]] = defaultdict(list)
        for family in leaves:
            by_layer: dict[int, set[int]] = defaultdict(set)
            for layer, item in family.members:
                by_layer[layer].add(item)
            for layer, items in by_layer.items():
                held[layer].append(items)
            if routed:
                yield from _gaps(family, by_layer, count)
        if routed and count:
            more = {v for k, v in config.items() if "expert" in k and isinstance(v, int)}
            routers = {f.first.shape[0] for f in members if _ROUTER.search(f.leaf) and len(f.first.shape) == 2}
            for layer, sets in held.items():
                most = max(max(s) for s in sets) + 1
                if most > count and (most in routers or (most - count not in more and most % count)):
                    name = joined(container.rstrip("#."), [layer])
                    yield _problem("expert_count", name, f"{count} experts, as the configuration says", str(most))


def _gaps(family: Family, by_layer: Mapping[int, set[int]], count: int | None) -> Iterator[Problem]:
    """Name each expert of a layer that lacks a tensor which its siblings have."""
    usual = Counter(max(items) + 1 for items in by_layer.values()).most_common(1)[0][0]
    for layer, items in by_layer.items():
        total = min(count or usual, _MAX_EXPERTS)
        if len(items) * 2 < total:
            name = joined(family.template.rsplit(".#", 1)[0], [layer])
            found = f"{len(items)} with {family.template.rsplit('#.', 1)[-1]}"
            yield _problem("expert_count", name, f"{total} experts", found)
            continue
        for item in sorted(set(range(total)) - items):
            found = f"none, where {len(items)} other experts hold one"
            yield _problem("missing_tensor", joined(family.template, [layer, item]), "a tensor", found)


def _problem(kind: str, name: str, expected: str, found: str, severity: str = "error", **place: Any) -> Problem:
    place.setdefault("file", "")
    return Problem(kind=kind, name=name, expected=expected, found=found, severity=severity, **place)
