"""Damages to the index and to the set of files. Knows the container; must not know formats."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from harness.faults.catalogue import NoPlace
from harness.faults.disk.damage import a_matrix, damage, quantised, weights
from harness.faults.disk.files import INDEX, Files, Stored, shard_bytes

Index = dict[str, Any]


def _tensor(files: Files) -> str:
    return a_matrix(files).parts["weight"]


def _leave_out(files: Files, name: str) -> None:
    def edit(index: Index) -> None:
        del index["weight_map"][name]

    files.index_edits.append(edit)


def _map(files: Files, name: str, file: Any) -> list[str]:
    """Give a tensor another file in the index."""
    files.index_edits.append(lambda index: index["weight_map"].update({name: file}))
    return [name, str(file)]


@damage("headers", "without an index|index")
def index_missing(files: Files) -> list[str]:
    """The index is not there; loaders of one file take the first, or all."""
    files.after.append(lambda folder: (folder / INDEX).unlink())
    return [INDEX]


@damage("headers", "JSON|index")
def index_cut(files: Files) -> list[str]:
    """The index ends in its middle."""
    files.index_edits.append(lambda index: json.dumps(index)[:500])
    return [INDEX]


@damage("headers", "weight_map")
def index_without_a_map(files: Files) -> list[str]:
    """The index has no map of tensors."""
    files.index_edits.append(lambda index: index.update(weight_map=[]))
    return [INDEX]


@damage("headers", "twice")
def index_key_twice(files: Files) -> list[str]:
    """A tensor stands twice in the index, in two files."""
    name, other = _tensor(files), sorted(files.shards)[0]

    def twice(index: Index) -> str:
        return json.dumps(index).replace('"weight_map": {', f'"weight_map": {{"{name}": "{other}", ', 1)

    files.index_edits.append(twice)
    return [name]


@damage("headers", "as the index says")
def index_entry_of_another_file(files: Files) -> list[str]:
    """The index names another file for a tensor than the one that holds it."""
    name = _tensor(files)
    return _map(files, name, next(f for f in sorted(files.shards) if f != files.file_of(name)))


@damage("headers", "as the index says")
def index_entries_exchanged(files: Files) -> list[str]:
    """Two tensors have each other's file in the index."""
    a = _tensor(files)
    b = next(n for f, ts in files.shards.items() if f != files.file_of(a) for n in ts)
    return [*_map(files, a, files.file_of(b)), *_map(files, b, files.file_of(a))]


@damage("headers", "in no shard|as the index says")
def index_names_what_is_nowhere(files: Files) -> list[str]:
    """The index names a weight that no file holds."""
    return _map(files, "model.layers.3.self_attn.extra_proj.weight", sorted(files.shards)[0])


@damage("headers", "no entry|siblings|none, where|scale|FP8|without")
def index_leaves_a_tensor_out(files: Files) -> list[str]:
    """A tensor lies in its file and not in the index."""
    name = _tensor(files)
    _leave_out(files, name)
    return [name, a_matrix(files).name]


@damage("headers", "no entry|without|scale|where")
def index_leaves_a_scale_out(files: Files) -> list[str]:
    """The scales of a weight lie in their file and not in the index."""
    weight = quantised(files)
    _leave_out(files, weight.parts["scale"])
    return [weight.name, *weight.parts.values()]


@damage("headers", "bytes")
def total_size_wrong(files: Files) -> list[str]:
    """The index says another number of bytes in all."""
    files.index_edits.append(lambda index: index["metadata"].update(total_size=index["metadata"]["total_size"] - 4096))
    return [INDEX]


@damage("headers", "bytes")
def total_size_no_number(files: Files) -> list[str]:
    """The index says words where a number of bytes belongs."""
    files.index_edits.append(lambda index: index["metadata"].update(total_size="all of them"))
    return [INDEX]


@damage("headers", "without folders|plain file name")
def path_up_and_out(files: Files) -> list[str]:
    """The index names a file outside the folder, by a relative path; it is there and holds the tensor."""
    name = _tensor(files)
    value = files.get(name)
    files.after.append(lambda folder: _outside(folder, name, value))
    return _map(files, name, "../outside.safetensors")


@damage("headers", "without folders|plain file name")
def path_absolute(files: Files) -> list[str]:
    """The index names a file by an absolute path."""
    return _map(files, _tensor(files), "/outside.safetensors")


@damage("headers", "without folders|plain file name")
def path_into_a_folder(files: Files) -> list[str]:
    """The index names a file in a folder of its own."""
    return _map(files, _tensor(files), f"original/{sorted(files.shards)[0]}")


@damage("headers", "plain file name|without folders")
def path_with_other_slashes(files: Files) -> list[str]:
    """The index names a file outside the folder as another system writes paths."""
    return _map(files, _tensor(files), "..\\outside.safetensors")


@damage("headers", "plain file name|name that a file can have")
def shard_name_of_control_characters(files: Files) -> list[str]:
    """The index names a file that no file can be called."""
    return _map(files, _tensor(files), "model\x00\n.safetensors")


@damage("headers", "plain file name|no file")
def shard_name_a_number(files: Files) -> list[str]:
    """The index has a number where the name of a file belongs."""
    return _map(files, _tensor(files), 3)


def _outside(folder: Path, name: str, value: Stored) -> None:
    (folder.parent / "outside.safetensors").write_bytes(shard_bytes({name: value}))


@damage("headers", "stays inside")
def link_out_of_the_folder(files: Files) -> list[str]:
    """A file is a link to one outside the folder."""
    file = files.file_of(_tensor(files))

    def act(folder: Path) -> None:
        os.replace(folder / file, folder.parent / "outside.safetensors")
        (folder / file).symlink_to(folder.parent / "outside.safetensors")

    files.after.append(act)
    return [file]


@damage("headers", "no file|on disk")
def shard_missing(files: Files) -> list[str]:
    """A file that the index names is not there."""
    file = files.file_of(_tensor(files))
    files.after.append(lambda folder: (folder / file).unlink())
    return [file, *files.shards[file]]


@damage("headers", "regular file")
def shard_a_folder(files: Files) -> list[str]:
    """A file that the index names is a folder."""
    file = files.file_of(_tensor(files))

    def act(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).mkdir()

    files.after.append(act)
    return [file, *files.shards[file]]


@damage("headers", "as the index says")
def shards_exchanged(files: Files) -> list[str]:
    """Two files have each other's name."""
    a, b = sorted(files.shards)[:2]

    def act(folder: Path) -> None:
        os.replace(folder / a, folder / "x")
        os.replace(folder / b, folder / a)
        os.replace(folder / "x", folder / b)

    files.after.append(act)
    return [a, b, *files.shards[a], *files.shards[b]]


@damage("headers", "as the index says|again|no file")
def shard_doubled(files: Files) -> list[str]:
    """One file is a copy of another."""
    a, b = sorted(files.shards)[:2]
    files.after.append(lambda folder: (folder / b).write_bytes((folder / a).read_bytes()))
    return [a, b, *files.shards[a], *files.shards[b]]


@damage("headers", "again")
def stray_shard_of_another_export(files: Files) -> list[str]:
    """A file of a second export lies in the folder, with tensors of the same names."""
    name = _tensor(files)
    files.beside["model-00001-of-00002.safetensors"] = shard_bytes({name: files.get(name)})
    return [name, "model-00001-of-00002.safetensors"]


@damage("headers", "again")
def consolidated_file_beside(files: Files) -> list[str]:
    """A single file with a tensor of the checkpoint lies beside its shards; loaders prefer it."""
    name = _tensor(files)
    files.beside["model.safetensors"] = shard_bytes({name: files.get(name)})
    return [name, "model.safetensors"]


@damage("headers", "nothing names")
def stray_shard(files: Files) -> list[str]:
    """A file that nothing names lies in the folder."""
    files.beside["adapter_model.safetensors"] = shard_bytes({"x.lora_A.weight": files.get(_tensor(files))})
    return ["adapter_model.safetensors"]


@damage("headers", "only in")
def tensor_in_two_files(files: Files) -> list[str]:
    """A tensor lies in two files of the index, with other values in each."""
    name = _tensor(files)
    home = files.file_of(name)
    other = next(f for f in sorted(files.shards) if f != home)
    value = files.get(name)
    twin = Stored(dtype=value.dtype, shape=value.shape, data=value.data[::-1].copy())
    files.shards[other] = {**files.shards[other], name: twin}
    return _map(files, name, home)


@damage("headers", "not names|nothing names|missing|none, where|layers|scale|index|shard")
def shard_left_out(files: Files) -> list[str]:
    """Neither the index nor the folder has one of the numbered files."""
    file = sorted(files.shards)[-2]
    gone = files.shards.pop(file)
    return [file, *gone, "*"]


@damage("headers", "case")
def file_names_that_differ_by_case(files: Files) -> list[str]:
    """A second file has the name of a shard but for its case."""
    file = sorted(files.shards)[0]
    files.beside[file.replace("model", "Model")] = shard_bytes({"y": files.get(_tensor(files))})
    return [file, file.replace("model", "Model")]


@damage("headers", "none, where|layers|siblings|only what")
def key_with_a_prefix(files: Files) -> list[str]:
    """The tensors of one module have a name that loaders do not know."""
    weight = weights(files, kinds="linear router")[0]
    for part in weight.parts.values():
        files.rename(part, part.replace(".weight", ".inner.weight").replace(".qweight", ".inner.qweight"))
    if not any(".inner." in n for ts in files.shards.values() for n in ts):
        raise NoPlace("no name to change")
    return [weight.name, *weight.parts.values(), "*.inner.*"]
