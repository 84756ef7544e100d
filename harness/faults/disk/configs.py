"""Damages to the configuration: words that the tensors contradict, and words that nothing in the files can check.

Knows the keys that exporters write; must not know formats.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.faults.catalogue import NoPlace
from harness.faults.disk.damage import damage, weights
from harness.faults.disk.files import Files

FILE = "config.json"
Config = dict[str, Any]


def _set(files: Files, changed: Callable[[Any], Any], *keys: str) -> list[str]:
    """Change the first of these keys that there is. Raises NoPlace."""
    for key in keys:
        if key in files.config:
            files.config[key] = changed(files.config[key])
            return [FILE, "*"]
    raise NoPlace(f"no {keys[0]} here")


def _quantisation(files: Files) -> Config:
    found = files.config.get("quantization_config")
    if not isinstance(found, dict):
        raise NoPlace("nothing is quantised here")
    return found


def _of_weights(files: Files) -> Config:
    """Return the group of words that describes weights."""
    words = _quantisation(files)
    for group in words.get("config_groups", {}).values():
        return group["weights"]  # type: ignore[no-any-return]
    if "global_quant_config" in words:
        return words["global_quant_config"]["weight"]  # type: ignore[no-any-return]
    return words


@damage("headers", "configuration")
def config_missing(files: Files) -> list[str]:
    """There is no configuration at all."""
    files.after.append(lambda folder: (folder / FILE).unlink())
    return [FILE, "*"]


@damage("headers", "JSON")
def config_cut(files: Files) -> list[str]:
    """The configuration ends in its middle."""

    def act(folder: Path) -> None:
        (folder / FILE).write_text((folder / FILE).read_text()[:200])

    files.after.append(act)
    return [FILE]


@damage("headers", "once|twice")
def config_key_twice(files: Files) -> list[str]:
    """A key stands twice in the configuration with two values."""

    def act(folder: Path) -> None:
        text = json.dumps(files.config)
        (folder / FILE).write_text('{"num_hidden_layers": 2, ' + text[1:])

    files.after.append(act)
    return [FILE]


# --- quantisation ---


@damage("headers", "quantization_config|none|no weight_block_size|bits")
def quantisation_unsaid(files: Files) -> list[str]:
    """The configuration does not say that anything is quantised."""
    if not files.config.pop("quantization_config", None):
        raise NoPlace("nothing is quantised here")
    files.beside.pop("hf_quant_config.json", None)
    return ["*"]


@damage("headers", "stores|weights as|block|group|weight_block_size|bits")
def quantisation_of_another_method(files: Files) -> list[str]:
    """The configuration names another method than the tensors are of."""
    method = "gptq" if _quantisation(files)["quant_method"] != "gptq" else "awq"
    files.config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128}
    return ["*"]


@damage("headers", "stores|weights as")
def quantisation_of_plain_weights(files: Files) -> list[str]:
    """The configuration says that plain weights are quantised."""
    if "quantization_config" in files.config:
        raise NoPlace("they are")
    files.config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return ["*"]


@damage("headers", "stores|weights as|bits|groups|scales")
def format_of_another_name(files: Files) -> list[str]:
    """The configuration gives another layout of the same method."""
    words = _quantisation(files)
    if "format" not in words:
        raise NoPlace("no format is named")
    words["format"] = "pack-quantized" if words["format"] != "pack-quantized" else "mxfp4-pack-quantized"
    return ["*"]


@damage("headers", "blocks of|fits")
def block_size_wrong(files: Files) -> list[str]:
    """The configuration gives smaller blocks than the scales are for."""
    words = _quantisation(files)
    if "weight_block_size" not in words:
        raise NoPlace("no blocks here")
    words["weight_block_size"] = [64, 64]
    return ["*"]


@damage("headers", "weight_block_size|block|scale")
def block_size_unsaid(files: Files) -> list[str]:
    """The configuration does not give the size of blocks."""
    if not _quantisation(files).pop("weight_block_size", None):
        raise NoPlace("no blocks here")
    return ["*"]


@damage("headers", "group")
def group_size_wrong(files: Files) -> list[str]:
    """The configuration gives another size of groups than the scales are for."""
    words = _of_weights(files)
    if "group_size" not in words:
        raise NoPlace("no groups here")
    words["group_size"] *= 2
    return ["*"]


@damage("headers", "bits")
def bits_wrong(files: Files) -> list[str]:
    """The configuration gives another number of bits."""
    words = _of_weights(files)
    key = next((k for k in ("bits", "num_bits") if k in words), "")
    if not key:
        raise NoPlace("no bits are named")
    words[key] = 8 if words[key] == 4 else 4
    return ["*"]


@damage("headers", "strategy|scale")
def strategy_wrong(files: Files) -> list[str]:
    """The configuration says one scale for a tensor where there is one for each row, or the reverse."""
    words = _of_weights(files)
    key = "strategy" if "strategy" in words else "qscheme"
    other = {"tensor": "channel", "channel": "tensor", "group": "channel", "tensor_group": "channel",
             "per_tensor": "per_channel", "per_group": "per_channel"}  # fmt: skip
    if words.get(key) not in other:
        raise NoPlace("no strategy is named")
    words[key] = other[words[key]]
    return ["*"]


@damage("headers", "fmt|e5m2|e4m3|F8_")
def float_dialect_wrong(files: Files) -> list[str]:
    """The configuration names another FP8 dialect than the tensors have."""
    words = _quantisation(files)
    if "fmt" in words:
        words["fmt"] = "e5m2"
    elif str(_of_weights(files).get("dtype", "")).startswith("fp8"):
        _of_weights(files)["dtype"] = "fp8_e4m3"
    else:
        raise NoPlace("no dialect is named")
    return ["*"]


@damage("suspicion", "mean|centre|zero point|version")
def gptq_version_wrong(files: Files) -> list[str]:
    """The configuration gives the other version of GPTQ: every zero point is off by one."""
    words = _quantisation(files)
    if "checkpoint_format" not in words:
        raise NoPlace("no version is named")
    words["checkpoint_format"] = "gptq" if words["checkpoint_format"] == "gptq_v2" else "gptq_v2"
    return ["*"]


@damage("headers", "ignore")
def ignored_though_quantised(files: Files) -> list[str]:
    """The configuration says that a kind of quantised module stays as it is."""
    words = _quantisation(files)
    key = next((k for k in ("ignore", "exclude", "modules_to_not_convert") if isinstance(words.get(k), list)), "")
    if not key:
        raise NoPlace("no list of ignored modules")
    files.beside.pop("hf_quant_config.json", None)
    module = weights(files)[0].name.removesuffix(".weight")
    words[key] = [*words[key], module]
    return [module, f"{module}.weight"]


# --- sizes ---


@damage("headers", "layers")
def one_layer_more(files: Files) -> list[str]:
    """The configuration has a layer more than the tensors."""
    return _set(files, lambda n: n + 1, "num_hidden_layers")


@damage("headers", "layers")
def two_layers_fewer(files: Files) -> list[str]:
    """The configuration has two layers fewer than the tensors."""
    return _set(files, lambda n: n - 2, "num_hidden_layers")


@damage("headers", "expert")
def one_expert_more(files: Files) -> list[str]:
    """The configuration has an expert more than the tensors."""
    return _set(files, lambda n: n + 1, "num_experts", "n_routed_experts", "num_local_experts")


@damage("headers", "expert")
def one_expert_fewer(files: Files) -> list[str]:
    """The configuration has an expert fewer than the tensors."""
    return _set(files, lambda n: n - 1, "num_experts", "n_routed_experts", "num_local_experts")


@damage("headers", "rows")
def vocabulary_larger(files: Files) -> list[str]:
    """The configuration has more tokens than the embedding has rows."""
    return _set(files, lambda n: n + 8, "vocab_size")


@damage("headers", "rows")
def vocabulary_half(files: Files) -> list[str]:
    """The configuration has far fewer tokens than the embedding has rows."""
    return _set(files, lambda n: n // 2, "vocab_size")


@damage("headers", "columns|hidden")
def hidden_size_wrong(files: Files) -> list[str]:
    """The configuration has another hidden size."""
    return _set(files, lambda n: n * 2, "hidden_size")


@damage("headers", "rows|columns|intermediate")
def inner_size_wrong(files: Files) -> list[str]:
    """The configuration has another width of the dense layers."""
    if not any(w.name.endswith(("mlp.up_proj.weight", "mlp.experts.gate_up_proj")) for w in files.weights.values()):
        raise NoPlace("no dense layer here")
    return _set(files, lambda n: n - 32, "intermediate_size")


@damage("headers", "rows|columns|moe_intermediate")
def expert_size_wrong(files: Files) -> list[str]:
    """The configuration has another width of experts."""
    return _set(files, lambda n: n + 32, "moe_intermediate_size")


@damage("headers", "heads")
def heads_wrong(files: Files) -> list[str]:
    """The configuration has twice as many heads."""
    return _set(files, lambda n: n * 2, "num_attention_heads")


@damage("headers", "heads")
def key_heads_wrong(files: Files) -> list[str]:
    """The configuration has as many heads of keys as of queries."""
    if files.config["num_key_value_heads"] in (1, files.config["num_attention_heads"]):
        raise NoPlace("no grouped queries")
    return _set(files, lambda n: n * 2, "num_key_value_heads")


@damage("headers", "kv_lora_rank|rank|rows|columns")
def latent_rank_wrong(files: Files) -> list[str]:
    """The configuration has another rank of the latent keys and values."""
    return _set(files, lambda n: n // 2, "kv_lora_rank")


@damage("headers", "qk_rope_head_dim|heads|rows")
def rotary_part_wrong(files: Files) -> list[str]:
    """The configuration has another size of the rotary part of heads."""
    return _set(files, lambda n: n * 2, "qk_rope_head_dim")


@damage("headers", "index")
def indexer_heads_wrong(files: Files) -> list[str]:
    """The configuration has another number of the indexer's heads."""
    return _set(files, lambda n: n * 2, "index_n_heads")


@damage("headers", "tie")
def tied_and_stored_otherwise(files: Files) -> list[str]:
    """The configuration ties the head to the embedding, and the file holds another head."""
    return _set(files, lambda _: True, "tie_word_embeddings")


@damage("headers", "experts|more than")
def more_chosen_than_there_are(files: Files) -> list[str]:
    """The configuration chooses more experts for a token than there are."""
    return _set(files, lambda n: 99, "num_experts_per_tok")


@damage("headers", "bias")
def biases_promised(files: Files) -> list[str]:
    """The configuration promises biases of attention that no file holds."""
    if files.config.get("attention_bias") is not False:
        raise NoPlace("they are there")
    return _set(files, lambda _: True, "attention_bias")


# --- what no tensor contradicts ---


@damage("manifest", "digest|blake")
def rotary_base_changed(files: Files) -> list[str]:
    """The configuration has another rotary base."""
    return _set(files, lambda base: base * 50, "rope_theta")


@damage("manifest", "digest|blake")
def epsilon_changed(files: Files) -> list[str]:
    """The configuration has another epsilon of norms."""
    return _set(files, lambda _: 1e-5, "rms_norm_eps")


@damage("manifest", "digest|blake")
def one_expert_less_chosen(files: Files) -> list[str]:
    """The configuration chooses one expert fewer for a token."""
    return _set(files, lambda n: n - 1, "num_experts_per_tok")
