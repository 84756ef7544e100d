"""What a module's parameters are made of, and making them. Knows recipes and dtypes; must not know transformers.

A recipe turns stored weights into parameters: mostly one into one, for merged experts hundreds into one. Everything is
read, decoded once, and made for each precision that asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from harness.adapters.stream.shards import Shards
from harness.checkpoint import Logical
from harness.checkpoint.room import room
from harness.errors import CheckpointError

_LARGE_BYTES = 1 << 22
Load = Callable[[str], Tensor]
Make = Callable[[Load], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How some parameters come about. `sources` are names of weights in the checkpoint, `targets` of the module.

    `make` gives them by name, asking for its sources by name as it needs them; None hands the one source on.
    """

    targets: tuple[str, ...]
    sources: tuple[str, ...]
    make: Make | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A module's parameters and persistent buffers in one precision, without their values.

    `shapes` and `dtypes` by name, `recipes` by the name of what they make, `same` gives for a tied name the one that
    stands for it. `wide` says that what stays in float32 is raised to float64.
    """

    shapes: Mapping[str, torch.Size]
    dtypes: Mapping[str, torch.dtype]
    recipes: Mapping[str, Recipe]
    same: Mapping[str, str]
    wide: bool = False

    def of(self, name: str) -> Recipe | None:
        """Return the recipe of a parameter, None where the checkpoint has nothing for it."""
        return self.recipes.get(self.same.get(name, name))


class Weights:
    """The weights of one checkpoint, for any number of modules of one architecture in any precision."""

    def __init__(self, shards: Shards) -> None:
        from harness.checkpoint import logical_tensors

        self.shards = shards
        self.logicals = {x.name: x for x in logical_tensors(shards.checkpoint)}
        self.shapes: dict[str, Shape] = {}

    def read(self, names: Sequence[str], keys: Iterable[str]) -> dict[str, dict[str, Tensor]]:
        """Return for each precision the values of some parameters.

        Raises:
            CheckpointError: a shard changed, a weight cannot be decoded, or its shape is not that of the parameter.
        """
        keys = list(keys)
        found: dict[str, dict[str, Tensor]] = {key: {} for key in keys}
        for group in self._grouped(names, keys[0]):
            self.shards.check(self._stored(group.recipe.sources))
            decoded: dict[str, Tensor] = {}
            for key in keys:
                recipe = self.shapes[key].of(next(iter(group.wanted)))
                assert recipe is not None  # one architecture: the same recipes in every precision
                made = self._made(recipe, self.shapes[key], decoded)
                for name, target in group.wanted.items():
                    found[key][name] = _checked(name, made, target, self.shapes[key])
        return found

    def announce(self, names: Sequence[str], key: str) -> None:
        """Say that these parameters are made soon."""
        self.shards.announce(self._stored(self.sources(names, key)))

    def drop(self, names: Sequence[str], key: str) -> None:
        """Give back the pages of the files that these parameters were made of."""
        self.shards.drop(self._stored(self.sources(names, key)))

    def groups(self, key: str) -> Iterator[list[str]]:
        """Yield all parameters of a module that the checkpoint has something for, those of one recipe together."""
        for group in self._grouped([*self.shapes[key].shapes], key):
            yield [*group.wanted]

    def sources(self, names: Sequence[str], key: str) -> list[str]:
        """Return the weights that parameters are made of, each once."""
        return list(dict.fromkeys(s for group in self._grouped(names, key) for s in group.recipe.sources))

    def plain(self, name: str, key: str) -> Tensor | None:
        """Return a matrix that is stored as it is, as a view on its file; None for any other parameter."""
        recipe = self.shapes[key].of(name)
        if recipe is None or recipe.make is not None:
            return None
        logical = self.logicals[recipe.sources[0]]
        if logical.quantised or logical.shape != tuple(self.shapes[key].shapes[name]):
            return None
        return self.shards.stored(logical.parts["weight"])

    def cast(self, value: Tensor, name: str, key: str) -> Tensor:
        """Return what a module of a precision holds for values of a parameter."""
        shape = self.shapes[key]
        value = value.to(shape.dtypes[name])
        return value.double() if shape.wide and value.dtype is torch.float32 else value

    def bytes_of(self, names: Sequence[str], key: str) -> int:
        """Return the bytes that parameters take, stored and as a module of a precision holds them."""
        shape, parts = self.shapes[key], self._stored(self.sources(names, key))
        held = sum(shape.shapes[name].numel() * shape.dtypes[name].itemsize for name in names)
        return held + sum(self.shards.checkpoint.tensors[part].nbytes for part in parts)

    def _made(self, recipe: Recipe, shape: Shape, decoded: dict[str, Tensor]) -> Mapping[str, Tensor]:
        dtype = shape.dtypes[recipe.targets[0]]

        def load(source: str) -> Tensor:
            logical = self.logicals[source]
            if source not in decoded:
                value = self.shards.decoded(logical)
                if not logical.quantised:
                    return _in(value, dtype)
                decoded[source] = value
            return _in(decoded[source], dtype)

        made = recipe.make(load) if recipe.make is not None else {recipe.targets[0]: load(recipe.sources[0])}
        if not shape.wide:
            return made
        return {name: value.double() if value.dtype is torch.float32 else value for name, value in made.items()}

    def _stored(self, sources: Iterable[str]) -> list[str]:
        return [name for source in sources for name in self.logicals[source].parts.values()]

    def _grouped(self, names: Sequence[str], key: str) -> Iterator[_Group]:
        """Yield each recipe once, with the parameters that are wanted of it: own name -> name in the recipe."""
        shape, groups = self.shapes[key], dict[int, _Group]()
        for name in names:
            recipe = shape.of(name)
            if recipe is not None:
                group = groups.setdefault(id(recipe), _Group(recipe=recipe, wanted={}))
                group.wanted[name] = shape.same.get(name, name)
        yield from groups.values()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    recipe: Recipe
    wanted: dict[str, str]


def _in(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a value in a dtype: itself where it is that, else in memory that is quick to touch first."""
    if value.dtype is dtype or value.numel() * dtype.itemsize < _LARGE_BYTES:
        return value.to(dtype)
    return room(tuple(value.shape), dtype).copy_(value)


def _checked(name: str, made: Mapping[str, Tensor], target: str, shape: Shape) -> Tensor:
    value = made.get(target)
    expected = shape.shapes[name]
    if value is None or value.shape != expected:
        found = "nothing" if value is None else f"shape {list(value.shape)}"
        raise CheckpointError(f"expected {name!r} of shape {list(expected)} from the checkpoint, found {found}")
    return value


def by_name(module: nn.Module, logicals: Mapping[str, Logical]) -> dict[str, Recipe]:
    """Return the recipes of a module whose parameters have the names of the checkpoint."""
    return {name: Recipe(targets=(name,), sources=(name,)) for name in module.state_dict() if name in logicals}


def dry(recipe: Recipe, logicals: Mapping[str, Logical], dtype: torch.dtype) -> Mapping[str, Tensor]:
    """Return what a recipe makes, without values: shapes alone, nothing is read."""
    load = partial(_empty, logicals, dtype)
    return recipe.make(load) if recipe.make is not None else {recipe.targets[0]: load(recipe.sources[0])}


def _empty(logicals: Mapping[str, Logical], dtype: torch.dtype, name: str) -> Tensor:
    return torch.empty(logicals[name].shape, dtype=dtype, device="meta")
