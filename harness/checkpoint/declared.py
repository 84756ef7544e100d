"""Read what a configuration says of quantisation. Knows `quantization_config` and its relatives; must not know tensors.

Every value is hostile: of another type than expected it counts as not said.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from harness.checkpoint.container import Checkpoint
from harness.checkpoint.folder import read_json

_SIDE_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json")
"""Where older or other tools put it; read where config.json says nothing."""
_IGNORE_KEYS = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude", "exclude_modules", "skip_modules")
_GROUP_KEYS = ("group_size", "q_group_size")
_BITS_KEYS = ("num_bits", "bits", "w_bit", "wbits")
_BLOCK_KEYS = ("weight_block_size", "block_structure")
_DIALECT_KEYS = ("fmt", "dtype", "weight_dtype")
_STRATEGY_KEYS = ("strategy", "qscheme")
_MAX_PATTERN, _MAX_PATTERNS, _MAX_DEPTH, _MAX_REPETITIONS, _MAX_TESTS = 400, 20_000, 8, 3, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What a configuration says. Empty or None: it does not say.

    `formats` are the names of layouts it gives, `widths` all bits of weights, `groups` all sizes of groups (0: a row),
    `ignored` the patterns of modules that stay as they are, `source` the file that says so. `dialects` of small floats
    and `strategies` (what shares a scale: tensor, channel, group, block) are those named; `reordered`: inputs of GPTQ.
    """

    method: str = ""
    formats: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()
    block: tuple[int, int] | None = None
    groups: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()
    version: str = ""
    source: str = ""
    dialects: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()
    reordered: bool = False

    @property
    def group(self) -> int | None:
        """The first group size that is said, None where scales are a row each or nothing is said."""
        return self.groups[0] if self.groups and self.groups[0] > 0 else None


def declared(checkpoint: Checkpoint) -> Declared:
    """Return what a checkpoint's configuration says of quantisation; read once."""
    if "declared" not in checkpoint.known:
        checkpoint.known["declared"] = _declared(checkpoint)
    found: Declared = checkpoint.known["declared"]
    return found


def _declared(checkpoint: Checkpoint) -> Declared:
    for owner in (checkpoint.config, *_sub_configs(checkpoint.config)):
        for key in ("quantization_config", "compression_config"):
            if isinstance(owner.get(key), dict):
                return _of(owner[key], owner, "config.json")
    for file in _SIDE_FILES:
        try:
            value, _ = read_json(checkpoint.path / file)
        except (OSError, ValueError):
            continue
        if isinstance(value, dict):
            inner = value.get("quantization")
            return _of(inner if isinstance(inner, dict) else value, checkpoint.config, file)
    return Declared()


def _sub_configs(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for key in ("text_config", "llm_config", "language_config", "thinker_config"):
        if isinstance(config.get(key), dict):
            yield config[key]
            yield from (v for k, v in config[key].items() if k == "text_config" and isinstance(v, dict))


def _of(quantisation: Mapping[str, Any], owner: Mapping[str, Any], source: str) -> Declared:
    pairs = list(_walk(quantisation, 0))
    formats = [v for k, v in pairs if k in ("format", "quant_algo", "fmt", "expert_dtype") and isinstance(v, str)]
    if isinstance(owner.get("expert_dtype"), str):
        formats.append(owner["expert_dtype"])
    version = quantisation.get("checkpoint_format") or quantisation.get("version") or ""
    method = quantisation.get("quant_method") or quantisation.get("quant_type") or ""
    if not method and any(isinstance(quantisation.get(k), str) for k in ("quant_algo", "kv_cache_quant_algo")):
        method = "modelopt"
    if not method and any(k in ("w_bit", "q_group_size") for k, _ in pairs):
        method = "awq"
    elif not method and "bits" in quantisation and "desc_act" in quantisation:
        method = "gptq"
    blocks = [b for k, v in pairs if k in _BLOCK_KEYS and (b := _pair(v)) is not None]
    return Declared(
        method=method.lower() if isinstance(method, str) else "",
        formats=tuple(dict.fromkeys(f.lower() for f in formats)),
        widths=tuple(dict.fromkeys(v for k, v in pairs if k in _BITS_KEYS and _is_int(v))),
        block=blocks[0] if blocks else None,
        groups=tuple(dict.fromkeys(max(0, v) for k, v in pairs if k in _GROUP_KEYS and _is_int(v))),
        ignored=tuple(_patterns(pairs)),
        version=version.lower() if isinstance(version, str) else "",
        source=source,
        dialects=tuple(dict.fromkeys(m[1] for k, v in pairs if k in _DIALECT_KEYS and (m := _dialect(v)))),
        strategies=tuple(
            dict.fromkeys(v.removeprefix("per_") for k, v in pairs if k in _STRATEGY_KEYS and isinstance(v, str))
        ),
        reordered=quantisation.get("desc_act") is True,
    )


def _dialect(value: Any) -> re.Match[str] | None:
    return (
        re.fullmatch(r"(?:fp8_|float8_)?(e[45]m[23](?:fnuz)?)(?:fn)?", value.lower())
        if isinstance(value, str)
        else None
    )


def _walk(value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield every key and value below; what describes activations or the cache is not of weights."""
    if isinstance(value, dict) and depth < _MAX_DEPTH:
        for key, inner in value.items():
            yield key, inner
            if key not in ("input_activations", "output_activations", "kv_cache_scheme", "input_tensors", "bias"):
                yield from _walk(inner, depth + 1)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 40


def _pair(value: Any) -> tuple[int, int] | None:
    if isinstance(value, list) and len(value) == 2 and all(_is_int(v) and v > 0 for v in value):
        return value[0], value[1]
    return None


def _patterns(pairs: list[tuple[str, Any]]) -> Iterator[str]:
    left = _MAX_PATTERNS
    for key, value in pairs:
        if key in _IGNORE_KEYS and isinstance(value, list):
            for pattern in value[:left]:
                if isinstance(pattern, str) and 0 < len(pattern) <= _MAX_PATTERN:
                    yield pattern
            left = max(0, left - len(value))


def ignores(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Return what says whether a module (a name without `.weight`) is among those that stay as they are.

    A pattern is a name or the start or end of one, a glob, or `re:` and an expression; prefixes that only some loaders
    use do not count. An expression that could take for ever (a repetition of repetitions) matches nothing.
    """
    exact, tests = set(), []
    for pattern in patterns:
        if pattern.startswith("re:"):
            expression = _compiled(pattern[3:])
            if expression is not None:
                tests.append(partial(_matches, expression))
        elif "*" in pattern or "?" in pattern:
            expression = _compiled(_from_glob(pattern))
            if expression is not None:
                tests.append(partial(_matches, expression))
        else:
            exact.add(pattern.removesuffix(".weight").rstrip("."))

    def ignored(module: str) -> bool:
        parts = module.split(".")
        pieces = {".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}
        return not exact.isdisjoint(pieces) or any(test(module) for test in tests[:_MAX_TESTS])

    return ignored


def _matches(expression: re.Pattern[str], module: str) -> bool:
    shorter = module.split(".", 1)[1] if "." in module else module
    return bool(expression.match(module[:200]) or expression.match(shorter[:200]))


def _from_glob(pattern: str) -> str:
    return "".join(".*" if c == "*" else "." if c == "?" else re.escape(c) for c in pattern) + r"\Z"


def _compiled(text: str) -> re.Pattern[str] | None:
    unbounded = len(re.findall(r"[+*{]", text))
    if re.search(r"\)[+*{]", text) or unbounded > _MAX_REPETITIONS or re.search(r"\\\d", text):
        return None
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return None
