"""What differs from a usual folder and is right: silent, or a note says why. Knows containers and configurations."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from harness.faults.catalogue import NoPlace
from harness.faults.disk.damage import harmless, layer_of, quantised, weights
from harness.faults.disk.files import INDEX, Files, stored


@harmless()
def tied_head_absent(files: Files) -> list[str]:
    """The head is not in the file, and the configuration ties it to the embedding."""
    head = weights(files, kinds="head", layer=None)[0]
    files.drop(*head.parts.values())
    files.config["tie_word_embeddings"] = True
    return []


@harmless()
def tied_head_stored_again(files: Files) -> list[str]:
    """The head is in the file, is the embedding again, and the configuration ties them."""
    head, embedding = weights(files, kinds="head", layer=None)[0], weights(files, kinds="embedding", layer=None)[0]
    files.put(head.parts["weight"], files.get(embedding.parts["weight"]))
    files.config["tie_word_embeddings"] = True
    return []


@harmless("padded")
def vocabulary_padded(files: Files) -> list[str]:
    """The embedding has more rows than there are tokens, up to a multiple of 16."""
    files.config["vocab_size"] -= 11
    return []


@harmless("predict further tokens")
def layer_that_predicts_further_tokens(files: Files) -> list[str]:
    """A layer after the last predicts the token after next, and the configuration counts it apart."""
    last = files.config["num_hidden_layers"] - 1
    files.config["num_hidden_layers"] = last
    files.config["num_nextn_predict_layers"] = 1
    return []


@harmless("predict further tokens")
def layer_told_by_its_own_tensors(files: Files) -> list[str]:
    """Such a layer that the configuration does not count, told by the tensors that only it has."""
    last = files.config["num_hidden_layers"] - 1
    files.config["num_hidden_layers"] = last
    hidden = files.config["hidden_size"]
    at = next(
        w.name.split(".self_attn.")[0].split(".attn.")[0] for w in files.weights.values() if layer_of(w.name) == last
    )
    file = files.file_of(next(iter(weights(files, layer=last)[0].parts.values())))
    for name, shape in (("eh_proj", (hidden, 2 * hidden)), ("enorm", (hidden,)), ("hnorm", (hidden,)),
                        ("shared_head.norm", (hidden,))):  # fmt: skip
        bits = (np.random.default_rng(1).standard_normal(shape).astype("<f4").view("<u4") >> 16).astype("<u2")
        files.shards[file][f"{at}.{name}.weight"] = stored("BF16", bits)
    return []


@harmless()
def index_without_a_size(files: Files) -> list[str]:
    """An old index does not say how many bytes there are."""
    files.index_edits.append(lambda index: index.update(metadata={}))
    return []


@harmless()
def index_in_another_order(files: Files) -> list[str]:
    """The index lists its tensors in another order, with more metadata, on one line."""

    def edit(index: dict[str, Any]) -> str:
        index["weight_map"] = dict(reversed(list(index["weight_map"].items())))
        index["metadata"]["total_parameters"] = 12345
        return json.dumps(index)

    files.index_edits.append(edit)
    return []


@harmless("computed")
def index_names_a_computed_buffer(files: Files) -> list[str]:
    """An old index names a table of frequencies that is computed and not stored."""
    name, file = "model.layers.0.self_attn.rotary_emb.inv_freq", sorted(files.shards)[0]
    files.index_edits.append(lambda index: index["weight_map"].update({name: file}))
    return []


@harmless()
def tensors_in_another_order(files: Files) -> list[str]:
    """Tensors lie in their files in another order than their names: experts are not in the order of their numbers."""
    for file, tensors in files.shards.items():
        names = list(tensors)
        np.random.default_rng(3).shuffle(names)
        files.shards[file] = {name: tensors[name] for name in names}
    return []


@harmless()
def scales_in_another_file(files: Files) -> list[str]:
    """The scales of a weight lie in another file than its codes."""
    name = quantised(files).parts["scale"]
    value, home = files.get(name), files.file_of(name)
    other = next(f for f in sorted(files.shards) if f != home)
    del files.shards[home][name]
    files.shards[other][name] = value
    return []


@harmless()
def layer_over_two_files(files: Files) -> list[str]:
    """The tensors of a layer lie in all files, one here and one there."""
    moved = [p for w in weights(files, kinds="linear expert norm") for p in w.parts.values()]
    names = sorted(files.shards)
    for i, part in enumerate(moved):
        value = files.get(part)
        del files.shards[files.file_of(part)][part]
        files.shards[names[i % len(names)]][part] = value
    return []


@harmless()
def one_file_for_all(files: Files) -> list[str]:
    """All tensors lie in one file without an index."""
    files.shards = {"model.safetensors": {n: t for ts in files.shards.values() for n, t in ts.items()}}
    files.after.append(lambda folder: (folder / INDEX).unlink())
    return []


@harmless()
def files_of_other_names(files: Files) -> list[str]:
    """The files are not numbered."""
    files.shards = {f"part-{chr(97 + i)}.safetensors": ts for i, (_, ts) in enumerate(sorted(files.shards.items()))}
    return []


@harmless()
def further_files(files: Files) -> list[str]:
    """Words, a template, code and a picture lie beside."""
    names = "generation_config.json tokenizer.json chat_template.jinja README.md modeling_own.py figure.png LICENSE"
    files.beside.update(dict.fromkeys(names.split(), b"{}"))
    return []


@harmless()
def headers_without_metadata(files: Files) -> list[str]:
    """No header has metadata, and none is padded to eight bytes."""

    def edit(header: dict[str, Any]) -> bytes:
        header.pop("__metadata__")
        return json.dumps(header, separators=(",", ":")).encode()

    files.header_edits.update(dict.fromkeys(files.shards, edit))
    return []


@harmless()
def headers_with_much_metadata(files: Files) -> list[str]:
    """Headers say more of their origin, in words of any language."""

    def edit(header: dict[str, Any]) -> None:
        header["__metadata__"] = {"format": "pt", "producteur": "équipe", "note": "重み", "quote": 'a "b" {c}, [d]'}

    files.header_edits.update(dict.fromkeys(files.shards, edit))
    return []


@harmless()
def links_into_a_store(files: Files) -> list[str]:
    """Files are links as a download cache keeps them: into its own store of blobs."""

    def act(folder: Path) -> None:
        blobs = folder.parent / "blobs"
        blobs.mkdir()
        for file in list(files.shards):
            os.replace(folder / file, blobs / file)
            (folder / file).symlink_to(f"../../blobs/{file}")
        moved = folder.parent / "snapshots" / "main"
        moved.parent.mkdir()
        os.replace(folder, moved)
        folder.symlink_to(moved)

    files.after.append(act)
    return []


@harmless()
def configuration_of_text_within(files: Files) -> list[str]:
    """The configuration of the text model lies within another one."""
    inner = {k: files.config.pop(k) for k in list(files.config) if k not in ("architectures", "quantization_config")}
    files.config.update(text_config=inner, model_type="wrapper", tie_word_embeddings=inner["tie_word_embeddings"])
    return []


@harmless()
def empty_tensor(files: Files) -> list[str]:
    """A tensor without elements lies at the end of a file."""
    file = sorted(files.shards)[-1]
    files.shards[file] = {**files.shards[file], "model.empty_buffer": stored("F32", np.zeros((0, 4), dtype="<f4"))}
    return []


@harmless()
def bias_of_zeros(files: Files) -> list[str]:
    """A bias is zero in all its elements: it may stay so."""
    found = weights(files, kinds="bias", layer=None)
    for bias in found[:4]:
        value = files.get(bias.parts["weight"])
        files.put(bias.parts["weight"], value.holding(np.zeros(value.shape, "<u2")))
    return []


@harmless()
def rows_of_padding_zero(files: Files) -> list[str]:
    """The last rows of the embedding, of tokens that do not exist, are zero."""
    weight = weights(files, kinds="embedding", layer=None)[0]
    value = files.get(weight.parts["weight"])
    array = value.array({"BF16": "<u2", "F16": "<f2", "F32": "<f4"}[value.dtype])
    array[-4:] = 0
    files.put(weight.parts["weight"], value.holding(array))
    return []


@harmless()
def block_of_zeros(files: Files) -> list[str]:
    """A few codes of a quantised matrix are zero; its scales are what they were."""
    weight = quantised(files)
    value = files.get(weight.parts["weight"])
    if value.dtype == "I32":
        raise NoPlace("a zero of packed words is no zero")
    raw = value.array("u1")
    raw.reshape(-1)[:16] = 0
    files.put(weight.parts["weight"], value.holding(raw))
    return []


@harmless()
def scale_bytes_by_their_own_dtype(files: Files) -> list[str]:
    """Scale bytes have the dtype that containers now have for them, in all weights."""
    changed = [w for w in files.weights.values() if "scale" in w.parts and files.get(w.parts["scale"]).dtype == "U8"]
    if not changed:
        raise NoPlace("no scale bytes without a dtype of their own")
    for weight in changed:
        part = weight.parts["scale"]
        files.put(part, files.get(part).labelled(dtype="F8_E8M0"))
    return []


@harmless()
def one_projection_left_plain(files: Files) -> list[str]:
    """A kind of projection was left as it is in every layer, and the configuration ignores it."""
    words = files.config.get("quantization_config", {})
    if not isinstance(words.get("ignore"), list):
        raise NoPlace("no list of ignored modules")
    files.beside.pop("hf_quant_config.json", None)
    changed = [w for w in files.weights.values() if w.name.endswith(".o_proj.weight") and "scale" in w.parts]
    for weight in changed:
        file = files.file_of(weight.parts["weight"])
        files.drop(*weight.parts.values())
        bits = (weight.truth.astype("<f4").view("<u4") >> 16).astype("<u2")
        files.shards[file][weight.name] = stored("BF16", bits)
        words["ignore"].append(weight.name.removesuffix(".weight"))
    return []
