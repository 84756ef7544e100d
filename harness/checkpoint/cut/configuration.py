"""Edit a configuration so that it describes some of a model's layers. Knows what kinds of keys mean; no architecture.

Per-layer lists are found by their length, lists of layers by their contents, counts of first layers and periods by the
words of their keys. A period that cannot describe the cut gives way to an explicit list where the architecture has one;
what cannot be said is refused with layers that could be chosen instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from harness.checkpoint.cut.layers import spelt
from harness.checkpoint.cut.periods import Periods
from harness.checkpoint.expected import LAYERS
from harness.checkpoint.names import number, text_config, tower
from harness.errors import UsageError

TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which the text model's own configuration lies, where it is not the outer one."""
Known = Callable[[Mapping[str, Any]], Mapping[str, Sequence[Any]]]
"""What an architecture's own code works out of a configuration: its lists by key, also those that no file gives."""

_NEVER = re.compile(
    r"rope_(scaling|parameters)|mrope|tokens?_id|architectures|auto_map|2label|label2|image|kernel|dilation|stride"
    r"|^(bos|eos|pad)_|time_step|block_size|quant|(^|_)(mean|std)$"
)
_PER_LAYER = re.compile(r"layer|block|_types?$|pattern|ratio|sparsity|window|theta|_per_|schedule|hybrid|multiplier")
_INDICES = re.compile(r"layer|block|_idxs?$|_indices$|_indexes$|_ids$")
_PATTERN = re.compile(r"pattern|block_types$")
_FIRST = re.compile(
    r"^(num_|n_)?(first|dense|hash|initial|prefix|leading)_\w*(layers?|replace|blocks?)\w*$|first_k|num_dense|start_layer"
    r"|layers?_start|start_index$|^max_window_layers$"
)
_END = re.compile(r"layers?_end|end_layer|end_index$")
_ONE = re.compile(r"layer_(id|idx|index)$")
_LAST_SHARED = re.compile(r"^num_(kv_)?(shared|reuse)_(kv_)?layers$")
_GROUPED = re.compile(r"share_factor$")
_BLOCKS = re.compile(r"^num_mem_blocks$")
_BORROWS = re.compile(r"share|reuse")
_ALL_LAYERS_IN_ONE = ("hidden_size_per_layer_input",)
_PROMISED = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_layers", "num_mtp_modules")
_MOST_LAYERS = 100_000
_FEW = 8
_LONG = 6
"""A list of at least so many entries, one for each layer, is no coincidence whatever its name."""


def depth_of(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers that a configuration gives its text model."""
    return number(text_config(config), *LAYERS)


def cut_config(
    config: Mapping[str, Any],
    layers: Sequence[int],
    *,
    extra: int = 0,
    holders: Set[frozenset[int]] = frozenset(),
    known: Known | None = None,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the configuration of a model that has only `layers`, and notes.

    `extra` layers after the last are kept; `holders` are the sets of layers that hold a tensor of one name each.
    Raises UsageError where a key cannot say what is left, naming layers that could be chosen instead.
    """
    depth = depth_of(config)
    if not depth:
        raise UsageError(f"expected the number of layers in the configuration ({', '.join(LAYERS[:3])}), found none")
    if layers[-1] >= depth or not layers:
        raise UsageError(f"expected layers of 0-{depth - 1}, found {spelt(layers)}; choose among those")
    if depth > _MOST_LAYERS:
        raise UsageError(f"expected at most {_MOST_LAYERS} layers in the configuration, found {depth}")
    if config.get("is_encoder_decoder") is True:
        raise UsageError("expected a model of one stack of layers, found an encoder and a decoder: it is not cut")
    editor = _Editor(layers, depth, extra)
    result = editor.part(config)
    before = known(config) if known else {}
    wanted = {key: new for key, value in before.items() if (new := editor.of_layers(key, value)) is not None}
    editor.sets |= holders
    periods = Periods(layers, depth, editor.sets)
    result = periods.rewritten(config, result, editor.owns)
    if known is not None:
        result = _explicit(result, wanted, before, known, editor, periods)
    refusals = list(dict.fromkeys([*editor.refusals, *periods.refusals()]))
    if refusals:
        raise UsageError(f"layers {spelt(layers)} are no model of their own: " + "; ".join(refusals))
    return result, (*editor.notes, *periods.notes)


def _explicit(
    result: dict[str, Any],
    wanted: Mapping[str, list[Any]],
    before: Mapping[str, Sequence[Any]],
    known: Known,
    editor: _Editor,
    periods: Periods,
) -> dict[str, Any]:
    """Write out each list that the architecture would otherwise work out wrongly; say which periods that settles."""
    after = known(result)
    wrong = {key: value for key, value in wanted.items() if list(after.get(key, ())) != value}
    if wrong:
        result = _into_owner(result, wrong)
        after = known(result)
    for key, value in wanted.items():
        if list(after.get(key, ())) != value:
            editor.refusals.append(f"{key} of such a model would be {list(after.get(key, ()))}, not {value}")
        else:
            periods.settle(key, editor.sets_of(key, before[key]))
    return result


def _into_owner(config: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    """Put keys into the part of a configuration that gives the number of layers."""
    for key in TEXT_PARTS:
        inner = config.get(key)
        if isinstance(inner, dict):
            return {**config, key: _into_owner(inner, words)}
    return {**config, **words}


class _Editor:
    """One walk over a configuration. `sets` are sets of layers that its lists give."""

    def __init__(self, layers: Sequence[int], depth: int, extra: int) -> None:
        self.layers, self.depth, self.extra = tuple(layers), depth, extra
        self.place = {old: new for new, old in enumerate((*layers, *range(depth, depth + extra)))}
        self.sets: set[frozenset[int]] = set()
        self.refusals: list[str] = []
        self.notes: list[str] = []

    def owns(self, mapping: Mapping[str, Any]) -> bool:
        """Say whether a part of the configuration is of the text model's layers, not of another stack."""
        return number(mapping, *LAYERS) in (None, self.depth)

    def part(self, mapping: Mapping[str, Any]) -> dict[str, Any]:
        """Return one part of the configuration, edited; of a part with layers of its own what lies within it."""
        if not self.owns(mapping):
            return {k: self.part(v) if k in TEXT_PARTS and isinstance(v, dict) else v for k, v in mapping.items()}
        base = self._base(mapping)
        return {key: self._entry(key, value, mapping, base) for key, value in mapping.items()}

    def _entry(self, key: str, value: Any, owner: Mapping[str, Any], base: int) -> Any:
        if key in LAYERS:
            return len(self.layers) if value == self.depth else value
        if isinstance(value, dict):
            other = tower(key) != "text" or "encoder" in key or _NEVER.search(key)
            return value if other else self._by_layer(value) if _digits(value) else self.part(value)
        if _NEVER.search(key) or tower(key) in ("vision", "audio") or value is None or isinstance(value, bool):
            return value
        if isinstance(value, list):
            return self._list(key, value, base)
        if isinstance(value, str):
            return self._string(key, value)
        return self._number(key, value, owner) if isinstance(value, int) else value

    # --- lists ---

    def of_layers(self, key: str, value: Sequence[Any], base: int = 0) -> list[Any] | None:
        """Return a list that says something of each layer, or names layers, as it is here; None for any other."""
        if _NEVER.search(key) or tower(key) != "text":
            return None
        if self._indices(key, value):
            self.sets |= self.sets_of(key, value, base)
            return [self.place[v - base] + base for v in value if v - base in self.place]
        if self.depth <= len(value) <= self.depth + max(self.extra, 1) and (
            _PER_LAYER.search(key) or len(value) >= _LONG
        ):
            self.sets |= self.sets_of(key, value)
            self._borrowed(key, value)
            self._kinds(key, value)
            return self.picked(value)
        return None

    def sets_of(self, key: str, value: Sequence[Any], base: int = 0) -> set[frozenset[int]]:
        """Return the sets of layers that a list names, or that have the same entry in it."""
        if self._indices(key, value):
            return {frozenset(v - base for v in value if v - base < self.depth)}
        kinds: dict[str, set[int]] = {}
        for layer, item in enumerate(value[: self.depth]):
            kinds.setdefault(repr(item), set()).add(layer)
        return {frozenset(s) for s in kinds.values()}

    def picked(self, value: Sequence[Any]) -> list[Any]:
        """Return the entries of the chosen layers, and those after the last layer."""
        return [value[layer] for layer in self.layers] + list(value[self.depth :])

    def _list(self, key: str, value: list[Any], base: int) -> Any:
        found = self.of_layers(key, value, base)
        if found is not None:
            return found
        if 0 < len(value) < self.depth and _PATTERN.search(key) and all(isinstance(v, (str, int)) for v in value):
            return self._repeated(key, value)
        if len(value) == 2 and all(isinstance(v, int) for v in value) and (_FIRST.search(key) or _END.search(key)):
            return [self._number(key, v, {}) for v in value]
        return value

    def _repeated(self, key: str, value: Sequence[Any]) -> list[Any]:
        whole = [value[i % len(value)] for i in range(self.depth)]
        self.sets |= self.sets_of(key, whole)
        wanted = [whole[layer] for layer in self.layers]
        for size in range(1, len(wanted) + 1):
            if all(wanted[j] == wanted[j % size] for j in range(len(wanted))):
                return wanted[:size]
        return wanted

    def _indices(self, key: str, value: Any) -> bool:
        """Say whether a list names layers: whole numbers, each once, none beyond the last."""
        if not isinstance(value, (list, tuple)) or not value or not _INDICES.search(key) or _NEVER.search(key):
            return False
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in value) or len(set(value)) != len(value):
            return False
        if min(value) < 0 or max(value) > self.depth + self.extra:
            return False
        return len(value) != self.depth or sorted(value) in (
            list(range(self.depth)), list(range(1, self.depth + 1)),
        )  # fmt: skip

    def _base(self, mapping: Mapping[str, Any]) -> int:
        """Return 1 where the lists of layers of one part count from 1, else 0."""
        lists = [set(v) for k, v in mapping.items() if self._indices(k, v)]
        everything = set().union(*lists)
        if 0 in everything or not everything:
            return 0
        return 1 if self.depth in everything and everything <= set(range(1, self.depth + 1)) else 0

    def _by_layer(self, value: dict[str, Any]) -> dict[str, Any]:
        """Renumber a table whose keys are layers."""
        if max(int(k) for k in value) >= self.depth + self.extra:
            return value
        return {str(self.place[int(k)]): v for k, v in value.items() if int(k) in self.place}

    def _borrowed(self, key: str, value: Sequence[Any]) -> None:
        """Refuse a layer that goes on with what an earlier one computed, where that one is not there."""
        for layer in self.layers:
            if not (isinstance(value[layer], str) and _BORROWS.search(value[layer])):
                continue
            source = next((i for i in range(layer - 1, -1, -1) if not _BORROWS.search(str(value[i]))), None)
            if source is not None and source not in self.layers:
                self.refusals.append(
                    f"layer {layer} goes on with what layer {source} computed ({key}: {value[layer]}); choose both"
                )

    def _kinds(self, key: str, value: Sequence[Any]) -> None:
        """Note the kinds of layer that no chosen layer is of: what only they do is not exercised."""
        kinds = {item for item in value[: self.depth] if isinstance(item, str)}
        lost = sorted(kinds - {value[layer] for layer in self.layers}) if 1 < len(kinds) <= _FEW else []
        for kind in lost:
            where = [layer for layer in range(self.depth) if value[layer] == kind]
            note = f"no chosen layer is of kind {kind} ({key}); layers {spelt(where[:8])} are"
            self.notes += [note] if note not in self.notes else []

    # --- words and numbers ---

    def _string(self, key: str, value: str) -> str:
        """Edit a pattern with a letter for each layer, or layers in a row of numbers."""
        if _PATTERN.search(key) and 1 < len(value) <= self.depth and re.fullmatch(r"[A-Za-z*\-+.|]+", value):
            if len(value) == self.depth:
                self.sets |= self.sets_of(key, value)
                return "".join(value[layer] for layer in self.layers)
            return "".join(self._repeated(key, value))
        if _INDICES.search(key) and re.fullmatch(r"\d+(\s*,\s*\d+)+", value):
            numbers = [int(v) for v in value.split(",")]
            if self._indices(key, numbers):
                base = self._base({key: numbers})
                self.sets.add(frozenset(v - base for v in numbers))
                return ",".join(str(self.place[v - base] + base) for v in numbers if v - base in self.place)
        return value

    def _number(self, key: str, value: int, owner: Mapping[str, Any]) -> int:
        if key in _ALL_LAYERS_IN_ONE and value > 0:
            self.refusals.append(f"{key}: one embedding holds the rows of all {self.depth} layers, and it is not cut")
        if _LAST_SHARED.search(key) and value > 0:
            return self._last_shared(key, value, owner)
        if _GROUPED.search(key) and 1 < value <= self.depth:
            self._grouped(key, value)
        if _BLOCKS.search(key) and value > 0 and self.layers != tuple(range(len(self.layers))):
            self.refusals.append(f"{key}: layers use blocks in turns; choose the first layers without a gap")
        if _END.search(key) and 0 <= value < self.depth:
            return sum(layer <= value for layer in self.layers) - 1
        if _ONE.search(key) and 0 <= value < self.depth:
            return self._single(key, value)
        if _FIRST.search(key) and value > 0:
            return sum(layer < value for layer in self.layers)
        return value

    def _grouped(self, key: str, size: int) -> None:
        """Refuse a layer whose group's first one, which computes for all of it, is not there."""
        for layer in self.layers:
            if layer - layer % size not in self.layers:
                source = layer - layer % size
                self.refusals.append(f"layer {layer} uses what layer {source} computed ({key}: {size}); choose both")

    def _single(self, key: str, value: int) -> int:
        """Renumber the one layer that a key names."""
        if value not in self.place:
            self.refusals.append(f"{key} names layer {value}; choose it too")
        return self.place.get(value, value)

    def _last_shared(self, key: str, value: int, owner: Mapping[str, Any]) -> int:
        """Count the chosen among the last layers, which use the keys and values of earlier ones; ask for those."""
        start = self.depth - value
        kinds = owner.get("layer_types")
        for layer in (n for n in self.layers if n >= start):
            same = [i for i in range(start) if not isinstance(kinds, list) or kinds[i] == kinds[layer]]
            if not same or same[-1] not in self.layers:
                source = same[-1] if same else "none"
                self.refusals.append(f"layer {layer} uses the keys and values of layer {source} ({key}); choose both")
        return sum(layer >= start for layer in self.layers)


def _digits(value: Mapping[str, Any]) -> bool:
    return bool(value) and all(isinstance(k, str) and k.isdecimal() and len(k) < 8 for k in value)


def promised(config: Mapping[str, Any]) -> int:
    """Return how many layers after the last a configuration promises."""
    return number(text_config(config), *_PROMISED) or 0
