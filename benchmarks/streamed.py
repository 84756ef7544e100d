"""Record and verify a checkpoint far larger than the memory that is used: time, bytes read, peak memory by process.

    python benchmarks/streamed.py FOLDER --gigabytes 12           write it, record goldens, verify a port against them
    python benchmarks/streamed.py FOLDER --gigabytes 0.02 --hidden 256 --tokens 12        the same, small

A random Llama in bfloat16, hundreds of megabytes a layer. Memory is polled from /proc while `day0` and its workers run:
anonymous memory (what the system cannot take back) is what is bounded; pages of mapped files are shown beside it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

HEAD, SHARD_BYTES, POLL_S, CHUNK = 64, 1 << 30, 0.05, 1 << 22


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of the checkpoint."""

    hidden: int
    layers: int
    vocab: int

    @property
    def inner(self) -> int:
        """Width of the MLP."""
        return self.hidden * 8 // 3

    def layer(self, number: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensors of a layer."""
        at, h = f"model.layers.{number}", self.hidden
        for name, rows in (("q_proj", h), ("k_proj", h // 4), ("v_proj", h // 4), ("o_proj", h)):
            yield f"{at}.self_attn.{name}.weight", (rows, h)
        for name in ("gate_proj", "up_proj"):
            yield f"{at}.mlp.{name}.weight", (self.inner, h)
        yield f"{at}.mlp.down_proj.weight", (h, self.inner)
        yield f"{at}.input_layernorm.weight", (h,)
        yield f"{at}.post_attention_layernorm.weight", (h,)

    def groups(self) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
        """Yield tensors in groups that stay together in a shard."""
        yield [("model.embed_tokens.weight", (self.vocab, self.hidden))]
        for number in range(self.layers):
            yield [*self.layer(number)]
        yield [("model.norm.weight", (self.hidden,)), ("lm_head.weight", (self.vocab, self.hidden))]

    def config(self) -> dict[str, object]:
        """Return config.json."""
        heads = self.hidden // HEAD
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
            "vocab_size": self.vocab, "hidden_size": self.hidden, "intermediate_size": self.inner,
            "num_hidden_layers": self.layers, "num_attention_heads": heads, "num_key_value_heads": heads // 4,
            "head_dim": HEAD, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
            "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        }  # fmt: skip


def nbytes(group: Sequence[tuple[str, tuple[int, ...]]]) -> int:
    """Return the bytes of some tensors in bfloat16."""
    return sum(2 * int(np.prod(shape)) for _, shape in group)


def sized(gigabytes: float, hidden: int) -> Model:
    """Return a model of about this size (10^9 bytes)."""
    vocab = 32000 if hidden >= 1024 else 512
    one = Model(hidden, 1, vocab)
    layers = round((gigabytes * 1e9 - 4 * vocab * hidden) / nbytes([*one.layer(0)]))
    return Model(hidden, max(2, layers), vocab)


def write(model: Model, folder: Path) -> int:
    """Write the checkpoint, a few megabytes in memory at a time, unless it is there; return its bytes."""
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    for group in model.groups():
        if shards[-1] and nbytes(shards[-1]) + nbytes(group) > SHARD_BYTES:
            shards.append([])
        shards[-1] += group
    total = sum(map(nbytes, shards))
    if (folder / "config.json").is_file():
        return total
    folder.mkdir(parents=True, exist_ok=True)
    draw, owners = np.random.default_rng(0), {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, at = {}, 0
        for tensor, shape in shard:
            end = at + nbytes([(tensor, shape)])
            header[tensor] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
            owners[tensor], at = name, end
        text = json.dumps(header).encode()
        text += b" " * (-(len(text) + 8) % 64)
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor, shape in shard:
                file.writelines(random_bytes(tensor, shape, draw))
    index = {"metadata": {"total_size": total}, "weight_map": owners}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(model.config()))
    return total


def random_bytes(name: str, shape: tuple[int, ...], draw: np.random.Generator) -> Iterator[bytes]:
    """Yield the bytes of a tensor: a normal of variance 1/columns; norms about 1, the embedding of variance 1."""
    left = int(np.prod(shape))
    scale = 1.0 if "embed" in name else shape[-1] ** -0.5 if len(shape) == 2 else 0.2
    while left > 0:
        values = draw.standard_normal(min(left, CHUNK), dtype=np.float32) * np.float32(scale)
        values += np.float32(len(shape) == 1)
        left -= len(values)
        yield (values.view(np.uint32) >> 16).astype("<u2").tobytes()


@dataclass
class Watched:
    """The most that was seen of a command and its children, in bytes."""

    command: str
    seconds: float = 0.0
    code: int = 0
    anonymous: dict[str, int] = field(default_factory=dict)
    mapped: dict[str, int] = field(default_factory=dict)
    anonymous_together: int = 0

    @property
    def most(self) -> int:
        """Of one process."""
        return max(self.anonymous.values(), default=0)


def watched(words: Sequence[str], log: Path) -> Watched:
    """Run a command, its output to a log; return how long it took and what memory it and its children used at most."""
    seen = Watched(" ".join(words[:2]))
    begin = time.perf_counter()
    with log.open("w") as file:
        process = subprocess.Popen([*words], stdout=file, stderr=file)
    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(POLL_S):
            now = [look for pid in family(process.pid) if (look := memory(pid)) is not None]
            seen.anonymous_together = max(seen.anonymous_together, sum(anonymous for _, anonymous, _ in now))
            for name, anonymous, mapped in now:
                seen.anonymous[name] = max(seen.anonymous.get(name, 0), anonymous)
                seen.mapped[name] = max(seen.mapped.get(name, 0), mapped)

    poller = threading.Thread(target=poll)
    poller.start()
    seen.code = process.wait()
    ended.set()
    poller.join()
    seen.seconds = time.perf_counter() - begin
    return seen


def family(pid: int) -> list[int]:
    """Return a process and all that it started, also those with a session of their own."""
    found, parents = [pid], {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def memory(pid: int) -> tuple[str, int, int] | None:
    """Return what a process is, its anonymous memory and that of files, in bytes; None where it is gone."""
    try:
        rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (OSError, ValueError):
        return None
    if "RssAnon" not in rows:
        return None
    worker = next((Path(word).name for word in words if "sessions" in word or ".sessions" in word), "")
    anonymous, mapped = (int(rows[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile"))
    return (f"{worker} worker" if worker else "day0"), anonymous, mapped


def streamed_bytes(*folders: Path) -> int:
    """Return what the workers say that they read of the checkpoint, from their logs."""
    lines = [line for folder in folders for log in folder.rglob("log.txt") for line in log.read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("streamed "))


def sentence(name: str, seen: Watched, read: int, total: int) -> str:
    """Say what a command took."""
    processes = ", ".join(f"{who} {size / 1e9:.2f}" for who, size in sorted(seen.anonymous.items()))
    return (
        f"{name}: exit {seen.code}, {seen.seconds:.0f} s, read {read / 1e9:.2f} GB ({read / total:.1f} times the "
        f"checkpoint); anonymous memory in GB at most: {processes}; together {seen.anonymous_together / 1e9:.2f}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write, record, verify; print a table and leave FOLDER/streamed.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=12.0)
    parser.add_argument("--hidden", type=int, default=3072)
    parser.add_argument("--tokens", type=int, default=24, help="longest request")
    parser.add_argument("--stages", default="load,startup,text")
    given = parser.parse_args(argv)
    model = sized(given.gigabytes, given.hidden)
    begin = time.perf_counter()
    total = write(model, given.folder / "model")
    print(f"{total / 1e9:.2f} GB, {model.layers} layers of {nbytes([*model.layer(0)]) / 1e6:.0f} MB, written in "
          f"{time.perf_counter() - begin:.0f} s")  # fmt: skip
    spec = f"hf:{given.folder / 'model'}?stream=1"
    own = ["--reference", spec, "--set", f"accel.spec={spec}&dtype=bfloat16", "--stage", given.stages]
    own += ["--set", f"scope.max_length_tokens={given.tokens}", "--set", "scope.precisions=[]"]
    own += ["--set", "watchdog.run_s=3600", "--set", "watchdog.load_s=3600"]
    goldens, out = given.folder / "goldens", given.folder / "run"
    day0 = [sys.executable, "-m", "harness.cli"]
    steps = {
        "record": [*day0, "record", *own, "--out", str(goldens)],
        "verify": [*day0, "verify", *own, "--goldens", str(goldens), "--out", str(out)],
    }
    told: dict[str, object] = {"checkpoint_bytes": total, "layer_bytes": nbytes([*model.layer(0)])}
    for name, words in steps.items():
        seen = watched(words, given.folder / f"{name}.txt")
        sessions = goldens / ".sessions" if name == "record" else out / "sessions"
        read = streamed_bytes(sessions)
        told[name] = {
            "seconds": seen.seconds, "code": seen.code, "read_bytes": read, "times_the_checkpoint": read / total,
            "most_anonymous_bytes": seen.most, "anonymous_together_bytes": seen.anonymous_together,
            "anonymous_bytes": seen.anonymous, "mapped_bytes": seen.mapped,
        }  # fmt: skip
        print(sentence(name, seen, read, total))
    (given.folder / "streamed.json").write_text(json.dumps(told, indent=1))
    return max(told[name]["code"] for name in steps)  # type: ignore[index]


if __name__ == "__main__":
    sys.exit(main())
