"""A transformers folder built without values, and how its checkpoint's tensors become its parameters.

The library builds the module and its tables exactly as `from_pretrained` does, and its own rules rename, merge and
split; only its reading is left out: weights come from the house's decoders, a part at a time. Knows transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from harness.adapters.stream.weights import Load, Recipe, Shape, Weights, dry
from harness.checkpoint import Logical
from harness.errors import CheckpointError, SpecError


@dataclass(slots=True)
class _Asked:
    """What the library was about to do when it wanted to read."""

    recipes: dict[str, Recipe]
    dtypes: dict[str, torch.dtype]


def build(weights: Weights, call: Callable[[], tuple[nn.Module, Mapping[str, Any]]], key: str, *, wide: bool) -> Any:
    """Call `from_pretrained` so that nothing is read; return its module and loading information.

    What the checkpoint does not fill has real values, as the library initialises them; everything else lies on the
    meta device until `weights` gives it. `key` names the precision.

    Raises:
        SpecError: this version of transformers loads in another way.
        CheckpointError: stored tensors do not give a parameter of the module its shape.
    """
    asked = _Asked({}, {})
    with _not_reading(weights.logicals, asked):
        module, info = call()
    if not asked.recipes:
        raise SpecError(
            f"expected {type(module).__name__} to take weights of the checkpoint by name, found none it takes"
        )
    state = module.state_dict(keep_vars=True)
    shapes = {name: value.shape for name, value in state.items()}
    _check_shapes(asked, shapes, weights.logicals)
    weights.shapes[key] = Shape(
        shapes=shapes,
        dtypes={name: asked.dtypes.get(name, value.dtype) for name, value in state.items()},
        recipes=asked.recipes,
        same=_ties(state, asked.recipes),
        wide=wide,
    )
    return module, info


@contextmanager
def _not_reading(logicals: Mapping[str, Logical], asked: _Asked) -> Iterator[None]:
    """Let the library plan a load instead of doing one."""
    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import rename_source_key  # noqa: F401  (what the plan is made with)
        from transformers.utils.loading_report import LoadStateDictInfo

        library = PreTrainedModel._load_pretrained_model
    except (ImportError, AttributeError) as error:
        raise SpecError(
            f"streaming needs transformers 5, whose loading can be asked what it would do ({error})"
        ) from error

    def planned(model: Any, state_dict: Any, files: Any, load_config: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        names = set(model.state_dict())
        unexpected = _plan(model, load_config, logicals, asked)
        for name in asked.recipes:
            _filled(model, name)
        info = LoadStateDictInfo(
            missing_keys=names - set(asked.recipes), unexpected_keys=unexpected, mismatched_keys=set(),
            conversion_errors={}, error_msgs=[], skipped_pp_keys=set(),
        )  # fmt: skip
        return info, None

    PreTrainedModel._load_pretrained_model = staticmethod(planned)
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = staticmethod(library)


def _filled(model: Any, name: str) -> None:
    """Mark a parameter or buffer as one that has its values, so that it is not initialised."""
    model.get_parameter_or_buffer(name)._is_hf_initialized = True


def _plan(model: Any, load_config: Any, logicals: Mapping[str, Logical], asked: _Asked) -> set[str]:
    """Find out what every stored weight becomes; return the names that nothing takes.

    Source of the order of rules: `convert_and_load_state_dict_in_model` of transformers 5.24.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = load_config.weight_mapping or []
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    asked.dtypes |= {name: _wanted_dtype(name, value.dtype, load_config) for name, value in state.items()}
    merged: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    unexpected = set()
    for source in sorted(logicals, key=dot_natural_key):
        name, pattern = rename_source_key(source, renamings, converters, prefix, state)
        if name not in state and source in state:
            name, pattern = rename_source_key(source, [], [], base_model_prefix=prefix, meta_state_dict=state)
        if name not in state:
            unexpected.add(name)
        elif pattern is None:
            turned = logicals[source].format == "mxfp4_blocks" and _is_transposed(model, name)
            make = _turned(name, source) if turned else None
            asked.recipes[name] = Recipe(targets=(name,), sources=(source,), make=make)
        else:
            merged.setdefault(name, (by_pattern[pattern], []))[1].append((source, pattern))
    for name, (converter, sources) in merged.items():
        _add_converted(model, name, converter, sources, logicals, asked)
    return unexpected


def _add_converted(
    model: Any,
    name: str,
    converter: Any,
    sources: list[tuple[str, str]],
    logicals: Mapping[str, Logical],
    asked: _Asked,
) -> None:
    """Add the recipe of what a rule of the library makes of several tensors, or several of one."""

    def make(load: Load) -> Mapping[str, Tensor]:
        rule = deepcopy(converter)
        for source, pattern in sources:
            rule.add_tensor(name, source, pattern, _later(load, source))
        made = rule.convert(name, model=model, config=model.config)
        return {target: value[0] if isinstance(value, list) else value for target, value in made.items()}

    recipe = Recipe(targets=(name,), sources=tuple(source for source, _ in sources), make=make)
    targets = tuple(dry(recipe, logicals, asked.dtypes[name]))
    recipe = replace(recipe, targets=targets)
    asked.recipes |= dict.fromkeys(targets, recipe)


def _later(load: Load, source: str) -> Callable[[], Tensor]:
    return lambda: load(source)


def _turned(name: str, source: str) -> Callable[[Load], Mapping[str, Tensor]]:
    """Return a recipe for experts that multiply with [in, out] where the format stores [out, in]."""
    return lambda load: {name: load(source).transpose(-1, -2).contiguous()}


def _is_transposed(model: Any, name: str) -> bool:
    return bool(getattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed", False))


def _wanted_dtype(name: str, own: torch.dtype, load_config: Any) -> torch.dtype:
    """Return the precision that the library loads a parameter in: its exceptions, else that of the module."""
    from transformers.core_model_loading import build_glob_alternation

    exceptions = load_config.dtype_plan or {}
    if not exceptions:
        return own
    found, of_group, _ = build_glob_alternation(list(exceptions))
    match = found.search(name)
    return exceptions[of_group[match.lastgroup]] if match is not None and match.lastgroup else own


def _ties(state: Mapping[str, Any], recipes: Mapping[str, Recipe]) -> dict[str, str]:
    """Return for each name without a recipe of its own the tied one that has it."""
    owners = {id(value): name for name, value in state.items() if name in recipes}
    return {name: owners[id(v)] for name, v in state.items() if name not in recipes and id(v) in owners}


def _check_shapes(asked: _Asked, shapes: Mapping[str, torch.Size], logicals: Mapping[str, Logical]) -> None:
    """Raise CheckpointError where a recipe would make another shape than the module has."""
    for recipe in {id(r): r for r in asked.recipes.values()}.values():
        for name, value in dry(recipe, logicals, asked.dtypes[recipe.targets[0]]).items():
            if name in shapes and value.shape != shapes[name]:
                raise CheckpointError(
                    f"expected {name!r} of shape {list(shapes[name])}, found {list(value.shape)} from "
                    f"{recipe.sources[0]!r}; is config.json of another model?"
                )
