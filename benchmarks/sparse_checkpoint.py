"""Write a checkpoint of 1.5 TB as sparse files with true headers, and time `day0 inspect` on it.

    python benchmarks/sparse_checkpoint.py FOLDER              write it (about 200 MB on disk) and inspect it
    python benchmarks/sparse_checkpoint.py FOLDER --layers 4   a smaller one

93 layers of latent attention, 896 experts each, about 500,000 tensors, 96 shards: MXFP4 experts, FP8 blocks, the rest
bfloat16. Needs a file system with holes in files. Knows the container's bytes; imports nothing of what it measures.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

Entry = tuple[str, str, tuple[int, ...]]
SHARDS, BYTES = 96, {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}
HIDDEN, HEADS, NOPE, ROPE, VALUE, KV_LORA, Q_LORA, MOE, DENSE, VOCAB = (
    7168, 128, 128, 64, 128, 512, 1536, 1536, 18432, 163840,
)  # fmt: skip
INDEX_HEADS, INDEX_DIM, VISION_DEPTH, VISION, BLOCK = 64, 128, 27, 1152, 128


def mxfp4(name: str, rows: int, columns: int) -> Iterator[Entry]:
    """Yield a packed weight and its scale bytes, 32 columns each."""
    yield f"{name}.weight_packed", "U8", (rows, columns // 2)
    yield f"{name}.weight_scale", "U8", (rows, columns // 32)


def fp8(name: str, rows: int, columns: int) -> Iterator[Entry]:
    """Yield an FP8 weight and its grid of scales."""
    yield f"{name}.weight", "F8_E4M3", (rows, columns)
    yield f"{name}.weight_scale", "F32", (-(-rows // BLOCK), -(-columns // BLOCK))


def attention(prefix: str) -> Iterator[Entry]:
    """Yield latent attention with an indexer."""
    for name, rows, columns in (
        ("q_a_proj", Q_LORA, HIDDEN), ("q_b_proj", HEADS * (NOPE + ROPE), Q_LORA),
        ("kv_a_proj_with_mqa", KV_LORA + ROPE, HIDDEN), ("kv_b_proj", HEADS * (NOPE + VALUE), KV_LORA),
        ("o_proj", HIDDEN, HEADS * VALUE), ("indexer.wq_b", INDEX_HEADS * INDEX_DIM, Q_LORA),
        ("indexer.wk", INDEX_DIM, HIDDEN),
    ):  # fmt: skip
        yield from fp8(f"{prefix}.{name}", rows, columns)
    yield f"{prefix}.indexer.weights_proj.weight", "BF16", (INDEX_HEADS, HIDDEN)
    for part in ("weight", "bias"):
        yield f"{prefix}.indexer.k_norm.{part}", "F32", (INDEX_DIM,)
    yield f"{prefix}.q_a_layernorm.weight", "BF16", (Q_LORA,)
    yield f"{prefix}.kv_a_layernorm.weight", "BF16", (KV_LORA,)


def mlp(prefix: str, width: int) -> Iterator[Entry]:
    """Yield a gated MLP in FP8."""
    yield from fp8(f"{prefix}.gate_proj", width, HIDDEN)
    yield from fp8(f"{prefix}.up_proj", width, HIDDEN)
    yield from fp8(f"{prefix}.down_proj", HIDDEN, width)


def layer(number: int, experts: int) -> Iterator[Entry]:
    """Yield one decoder layer; layer 0 is dense."""
    prefix = f"model.layers.{number}"
    yield from attention(f"{prefix}.self_attn")
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{norm}.weight", "BF16", (HIDDEN,)
    if number == 0:
        yield from mlp(f"{prefix}.mlp", DENSE)
        return
    yield f"{prefix}.mlp.gate.weight", "BF16", (experts, HIDDEN)
    yield f"{prefix}.mlp.gate.e_score_correction_bias", "F32", (experts,)
    yield from mlp(f"{prefix}.mlp.shared_experts", MOE)
    for expert in range(experts):
        yield from mxfp4(f"{prefix}.mlp.experts.{expert}.gate_proj", MOE, HIDDEN)
        yield from mxfp4(f"{prefix}.mlp.experts.{expert}.up_proj", MOE, HIDDEN)
        yield from mxfp4(f"{prefix}.mlp.experts.{expert}.down_proj", HIDDEN, MOE)


def vision() -> Iterator[Entry]:
    """Yield a vision tower."""
    yield "visual.patch_embed.proj.weight", "BF16", (VISION, 3, 14, 14)
    for block in range(VISION_DEPTH):
        for name, rows, columns in (("attn.qkv", 3 * VISION, VISION), ("attn.proj", VISION, VISION),
                                    ("mlp.fc1", 4304, VISION), ("mlp.fc2", VISION, 4304)):  # fmt: skip
            yield f"visual.blocks.{block}.{name}.weight", "BF16", (rows, columns)
            yield f"visual.blocks.{block}.{name}.bias", "BF16", (rows,)
        for norm in ("norm1", "norm2"):
            for part in ("weight", "bias"):
                yield f"visual.blocks.{block}.{norm}.{part}", "BF16", (VISION,)
    yield "visual.merger.proj.weight", "BF16", (HIDDEN, 4 * VISION)


def tensors(layers: int, experts: int) -> Iterator[Entry]:
    """Yield every tensor of the checkpoint."""
    yield "model.embed_tokens.weight", "BF16", (VOCAB, HIDDEN)
    yield from vision()
    for number in range(layers):
        yield from layer(number, experts)
    yield "model.norm.weight", "BF16", (HIDDEN,)
    yield "lm_head.weight", "BF16", (VOCAB, HIDDEN)


def config(layers: int, experts: int) -> dict[str, object]:
    """Return the configuration that says the same."""
    group = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    block = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [BLOCK, BLOCK]}
    ignored = ["lm_head", "re:.*mlp\\.gate$", "re:.*norm.*", "re:.*weights_proj$", "re:.*embed_tokens$", "re:visual.*"]
    return {
        "hidden_size": HIDDEN, "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "kv_lora_rank": KV_LORA,
        "q_lora_rank": Q_LORA, "n_routed_experts": experts, "n_shared_experts": 1,
        "num_experts_per_tok": min(16, experts),
        "moe_intermediate_size": MOE, "intermediate_size": DENSE, "first_k_dense_replace": 1, "vocab_size": VOCAB,
        "index_head_dim": INDEX_DIM, "index_n_heads": INDEX_HEADS, "index_topk": 2048, "tie_word_embeddings": False,
        "vision_config": {"depth": VISION_DEPTH, "hidden_size": VISION}, "max_position_embeddings": 1048576,
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ignored,
            "config_groups": {
                "group_0": {"format": "mxfp4-pack-quantized", "targets": ["re:.*experts\\.\\d+.*"], "weights": group},
                "group_1": {"format": "float-quantized", "targets": ["Linear"], "weights": block},
            },
        },
    }  # fmt: skip


def size_of(entry: Entry) -> int:
    """Return the bytes of a tensor."""
    count = BYTES[entry[1]]
    for size in entry[2]:
        count *= size
    return count


def write_shard(path: Path, entries: list[Entry]) -> int:
    """Write a header and leave the data a hole. Returns the bytes of the data."""
    header, position = {}, 0
    for name, dtype, shape in entries:
        end = position + size_of((name, dtype, shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    words = json.dumps(header, separators=(",", ":")).encode()
    words += b" " * (-len(words) % 8)
    with path.open("wb") as stream:
        stream.write(len(words).to_bytes(8, "little") + words)
        stream.truncate(8 + len(words) + position)
    return position


def write(folder: Path, *, layers: int = 93, experts: int = 896, shards: int = SHARDS) -> tuple[int, int]:
    """Write the checkpoint. Returns the number of tensors and the bytes of their data."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = list(tensors(layers, experts))
    total = sum(size_of(e) for e in entries)
    weight_map: dict[str, str] = {}
    parts: list[list[Entry]] = [[] for _ in range(shards)]
    seen = 0
    for entry in entries:
        parts[min(shards - 1, seen * shards // total)].append(entry)
        seen += size_of(entry)
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        write_shard(folder / file, part)
        weight_map.update((name, file) for name, _, _ in part)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config(layers, experts), indent=1))
    return len(entries), total


def main() -> int:
    """Write, inspect, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=93)
    parser.add_argument("--experts", type=int, default=896)
    parser.add_argument("--layout", default="--tp 8 --ep 8 --pp 4 --context 131072 --card-gib 141")
    words = parser.parse_args()
    start = time.perf_counter()
    count, total = write(words.folder, layers=words.layers, experts=words.experts)
    disk = sum(p.stat().st_blocks * 512 for p in words.folder.iterdir())
    print(f"{count} tensors, {total / 1e12:.3f} TB, {disk / 1e6:.0f} MB on disk: {time.perf_counter() - start:.1f} s")
    start = time.perf_counter()
    command = [sys.executable, "-m", "harness.cli", "inspect", words.folder, *words.layout.split()]
    code = subprocess.run(command).returncode
    took, peak = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(f"inspect: {took:.1f} s, peak {peak / 1e6:.2f} GB, exit {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
