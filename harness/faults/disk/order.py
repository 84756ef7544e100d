"""Right values in a wrong place or of another origin. Knows layouts; must not know how they are read.

Most of these leave every number a plausible one: only a digest recorded before, or a reference, can tell.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from harness.faults.catalogue import NoPlace
from harness.faults.disk.damage import a_matrix, answers, damage, layer_of, pair, quantised, weights
from harness.faults.disk.files import Coded, Files
from harness.faults.disk.values import NUMPY, change

_DIGEST = "digest|seam|off_centre|size|magnitude|rows|finite|pattern"
"""By the digest of a file, or earlier by what its values look like."""


def _file(files: Files, *changed: Coded) -> list[str]:
    """Return the files that hold these weights, and the weights."""
    return [x for w in changed for x in (*(files.file_of(p) for p in w.parts.values()), *answers(w))]


def _exchange(files: Files, a: Coded, b: Coded, *roles: str) -> None:
    for role in roles or tuple(a.parts):
        first, second = files.get(a.parts[role]), files.get(b.parts[role])
        files.put(a.parts[role], second)
        files.put(b.parts[role], first)


@damage("manifest", _DIGEST)
def scales_of_another(files: Files) -> list[str]:
    """One weight has the scales of another of its shape."""
    a, b = pair(files, "scale")
    files.put(a.parts["scale"], files.get(b.parts["scale"]))
    return _file(files, a)


@damage("manifest", _DIGEST)
def scales_moved_by_a_row(files: Files) -> list[str]:
    """The scales of one weight lie a row too low."""
    weight = quantised(files)
    shape = files.get(weight.parts["scale"]).shape
    if len(shape) < 2 or shape[-2] < 2:
        raise NoPlace("no rows of scales")
    change(files, weight.parts["scale"], lambda a: np.roll(a, 1, axis=-2))
    return _file(files, weight)


@damage("manifest", _DIGEST)
def scales_transposed_in_a_square(files: Files) -> list[str]:
    """The grid of scales of a matrix is transposed, and square: no shape tells."""
    for weight in weights(files, role="scale", layer=None):
        shape = files.get(weight.parts["scale"]).shape
        if len(shape) >= 2 and shape[-1] == shape[-2] > 1:
            change(files, weight.parts["scale"], lambda a: np.ascontiguousarray(np.swapaxes(a, -1, -2)))
            return _file(files, weight)
    raise NoPlace("no square grid of scales")


@damage("manifest", _DIGEST)
def scales_read_in_the_other_order(files: Files) -> list[str]:
    """The scales of one weight were transposed and have kept their shape."""
    weight = next((w for w in weights(files, role="scale") if len(files.get(w.parts["scale"]).shape) >= 2
                   and min(files.get(w.parts["scale"]).shape[-2:]) > 1), None)  # fmt: skip
    if weight is None:
        raise NoPlace("no grid of scales")

    def edit(array: NDArray[np.generic]) -> NDArray[np.generic]:
        return np.ascontiguousarray(np.swapaxes(array, -1, -2)).reshape(array.shape)

    change(files, weight.parts["scale"], edit)
    return _file(files, weight)


def _packed(files: Files) -> Coded:
    for weight in weights(files):
        if files.get(weight.parts["weight"]).dtype in ("U8", "I8", "I32"):
            return weight
    raise NoPlace("nothing is packed here")


def _nibbles_exchanged(array: NDArray[np.generic]) -> NDArray[np.generic]:
    raw = np.ascontiguousarray(array).view("u1")
    return ((raw << 4) | (raw >> 4)).astype("u1").view(array.dtype).reshape(array.shape)


@damage("manifest", _DIGEST)
def nibbles_exchanged(files: Files) -> list[str]:
    """The two codes of each byte of one weight have changed places."""
    weight = _packed(files)
    change(files, weight.parts["weight"], _nibbles_exchanged)
    return _file(files, weight)


@damage("manifest", _DIGEST)
def all_nibbles_exchanged(files: Files) -> list[str]:
    """The two codes of each byte of every weight have changed places."""
    changed = [w for w in weights(files, layer=None) if files.get(w.parts["weight"]).dtype in ("U8", "I8", "I32")]
    if not changed:
        raise NoPlace("nothing is packed here")
    for weight in changed:
        change(files, weight.parts["weight"], _nibbles_exchanged)
    return _file(files, *changed)


@damage("manifest", _DIGEST)
def signs_lost(files: Files) -> list[str]:
    """The sign bits of one weight are lost."""
    weight = _packed(files)
    if "scale" not in weight.parts or files.get(weight.parts["weight"]).dtype == "I32":
        raise NoPlace("no sign bits in its codes")
    change(files, weight.parts["weight"], lambda a: (a.view("u1") & 0x77).view(a.dtype))
    return _file(files, weight)


@damage("manifest", _DIGEST)
def signs_turned(files: Files) -> list[str]:
    """One weight has the other sign in all elements."""
    weight = _packed(files)
    if files.get(weight.parts["weight"]).dtype == "I32":
        change(files, weight.parts["weight"], lambda a: (~a.view("u1")).view(a.dtype))
    else:
        change(files, weight.parts["weight"], lambda a: (a.view("u1") ^ 0x88).view(a.dtype))
    return _file(files, weight)


@damage("suspicion", "mean|zero point|centre|size|digest")
def offset_of_integers_lost(files: Files) -> list[str]:
    """The packed integers of one weight are stored without the 8 that is added to them."""
    weight = quantised(files, "shape")
    change(files, weight.parts["weight"], lambda a: (a.view("u1") ^ 0x88).view(a.dtype))
    return _file(files, weight)


@damage("manifest", _DIGEST)
def inputs_in_their_own_order(files: Files) -> list[str]:
    """One weight has the order of inputs that it would have without reordering."""
    weight = quantised(files, "group")
    change(files, weight.parts["group"], lambda a: np.sort(a))
    return _file(files, weight)


@damage("manifest", _DIGEST)
def experts_exchanged(files: Files) -> list[str]:
    """Two experts of one layer have changed places."""
    found = weights(files, kinds="expert")
    if files.get(found[0].parts["weight"]).shape[0] == 4 and ".experts." in found[0].name and found[0].truth.ndim == 3:
        for role in found[0].parts:
            change(files, found[0].parts[role], lambda a: a[[0, 2, 1, 3]])
        return _file(files, found[0])
    one = {w.name: w for w in found if ".experts.1." in w.name}
    for name, weight in one.items():
        _exchange(files, weight, files.weights[name.replace(".experts.1.", ".experts.2.")])
    return _file(files, *one.values())


@damage("manifest", _DIGEST)
def router_rows_exchanged(files: Files) -> list[str]:
    """Two rows of a router have changed places."""
    router = next(
        (w for w in weights(files, kinds="router") if w.name.endswith(("gate.weight", "router.weight"))), None
    )
    if router is None:
        raise NoPlace("no router here")
    change(files, router.parts["weight"], lambda a: a[[0, 2, 1, 3]])
    return _file(files, router)


def _gate_and_up(files: Files) -> tuple[Coded, Coded]:
    names = {w.name: w for w in weights(files)}
    for name, weight in names.items():
        for gate, up in ((".gate_proj.", ".up_proj."), (".w1.", ".w3.")):
            if gate in name and name.replace(gate, up) in names:
                return weight, names[name.replace(gate, up)]
    raise NoPlace("gate and up are one here")


@damage("manifest", _DIGEST)
def gate_and_up_exchanged(files: Files) -> list[str]:
    """Gate and up of one module have changed places."""
    gate, up = _gate_and_up(files)
    _exchange(files, gate, up)
    return _file(files, gate, up)


@damage("manifest", _DIGEST)
def gate_and_up_in_halves(files: Files) -> list[str]:
    """Rows of gate and up follow each other in two halves, where they should take turns."""
    merged = [w for w in weights(files, kinds="expert") if "gate_up" in w.name]
    if not merged:
        raise NoPlace("gate and up are two here")
    for role in merged[0].parts:
        change(files, merged[0].parts[role], lambda a: np.concatenate([a[:, 0::2], a[:, 1::2]], axis=1))
    return _file(files, merged[0])


@damage("manifest", _DIGEST)
def query_rows_permuted(files: Files) -> list[str]:
    """The rows of a head's queries are in the order of the other rotary style."""
    found = [w for w in weights(files, kinds="linear router") if w.name.endswith(("q_proj.weight", "q_b_proj.weight"))]
    if not found or set(found[0].parts) - {"weight", "scale"} or "qweight" in found[0].parts["weight"]:
        raise NoPlace("no rows of queries that lie in order")
    rows = np.arange(len(found[0].truth)).reshape(4, -1, 2).transpose(0, 2, 1).reshape(-1)
    for part in found[0].parts.values():
        if files.get(part).shape[:1] == (len(rows),):
            change(files, part, lambda a: a[rows])
    return _file(files, found[0])


@damage("manifest", _DIGEST)
def layers_exchanged(files: Files) -> list[str]:
    """A matrix and that of the next layer have changed places."""
    weight = a_matrix(files)
    number = layer_of(weight.name)
    assert number is not None
    other = files.weights[weight.name.replace(f".{number}.", f".{number + 1}.", 1)]
    _exchange(files, weight, other)
    return _file(files, weight, other)


@damage("manifest", _DIGEST)
def one_bit(files: Files) -> list[str]:
    """One bit of a matrix is another one."""
    weight = a_matrix(files)

    def edit(array: NDArray[np.generic]) -> None:
        raw = array.reshape(-1).view("u1")
        raw[len(raw) // 2] ^= 1

    change(files, weight.parts["weight"], edit)
    return _file(files, weight)


@damage("suspicion", "pattern|rows|never written")
def rows_never_written(files: Files) -> list[str]:
    """The rows at the end of a plainly stored matrix were never written."""
    weight = weights(files, kinds="linear expert")[0]
    if files.get(weight.parts["weight"]).dtype not in ("BF16", "F16", "F32") or weight.truth.ndim != 2:
        raise NoPlace("no plain matrix")

    def edit(array: NDArray[np.generic]) -> None:
        array[-len(array) // 4 :] = 0

    change(files, weight.parts["weight"], edit)
    return _file(files, weight)


@damage("manifest", _DIGEST)
def shard_of_another_step(files: Files) -> list[str]:
    """The weights of one file are those of a later training step: all a little different."""
    file = sorted(files.shards)[2]
    draw = np.random.default_rng(7)
    for name, value in files.shards[file].items():
        kind = NUMPY[value.dtype]
        if value.dtype in ("BF16", "F16", "F32") and len(value.shape) == 2:
            array = value.array(kind)
            at = draw.random(array.shape) < 0.3
            moved = (array.view(f"u{array.dtype.itemsize}") ^ at.astype(f"u{array.dtype.itemsize}")).view(kind)
            files.shards[file][name] = value.holding(moved)
        elif value.dtype in ("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ") and "scale" not in name:
            raw = value.array("u1").copy()
            raw ^= (draw.random(raw.shape) < 0.1).astype("u1") & (raw & 0x7E > 2).astype("u1")
            files.shards[file][name] = value.holding(raw)
        elif value.dtype == "I32" and "weight" in name.rsplit(".", 1)[-1]:
            raw = value.array("<i4")
            files.shards[file][name] = value.holding(raw ^ (draw.random(raw.shape) < 0.3).astype("<i4"))
    return [file, *files.shards[file]]


@damage("manifest", _DIGEST)
def router_bias_rounded(files: Files) -> list[str]:
    """A correction bias was rounded to bfloat16 and stored in float32 again."""
    bias = weights(files, kinds="kept")[-1]
    change(files, bias.parts["weight"], lambda a: (a.view("<u4") & 0xFFFF0000).view("<f4"))
    return _file(files, bias)


@damage("manifest", _DIGEST)
def biases_exchanged(files: Files) -> list[str]:
    """The biases of keys and values have changed places."""
    found = {w.name.rsplit(".", 2)[-2]: w for w in weights(files, kinds="bias") if w.name.endswith("_proj.bias")}
    if not {"k_proj", "v_proj"} <= set(found):
        raise NoPlace("no biases of keys and values")
    _exchange(files, found["k_proj"], found["v_proj"])
    return _file(files, found["k_proj"], found["v_proj"])
