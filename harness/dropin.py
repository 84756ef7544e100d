"""One file to drop into any engine's worker: it records what a model computes, in the form that day0 reads.

Needs torch and the standard library, nothing else; copy it anywhere. It knows nothing of day0's other rooms.

    from dropin import Recorder

    rec = Recorder("recordings", names=["model.layers.*", "lm_head"], rank=0, layout={"tp": 2})
    rec.watch(model)                                    # every module's output, under its path; before torch.compile
    rec.tokens("request-1", range(61), ids=prompt)      # whose rows come next; once for each forward
    model(...)
    x = rec.tap("router.scores", x)                     # or a place of your own: go on with what it returns
    rec.save()                                          # recordings/request-1/rank-0/manifest.json and its parts

Of everything that is watched it keeps statistics (statistics.jsonl: n, mean, rms, min, max, non-finite, a sketch of
values at fixed places), made on the device and fetched when a forward is over; whole tensors only of `names`. Rows are
told apart by request and position, so batches may be packed and a request may come in chunks and steps. What it sees it
copies and never changes. Save when a request is done: a worker that is killed leaves nothing else. In a region that
torch.compile captures, `tap` and watched modules go through an operator of their own, which costs a copy there and
breaks no graph; in a captured device graph nothing can be fetched, and the manifest says so.
"""

from __future__ import annotations

import atexit
import ctypes
import datetime
import fnmatch
import hashlib
import itertools
import json
import math
import os
import platform
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

FORMAT = "day0.trace/2"
VERSION = 1
SAMPLES = 16
PENDING = 512
PART_BYTES = 256 * 2**20
MAX_BYTES = 2 * 2**30
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
WIDENED = 1 << 20
_SCRATCH = threading.local()
_KINDS = {"logits": "logits", "inputs.token_ids": "input"}
_LIVE: dict[int, Recorder] = {}
_KEYS = itertools.count()


class Recorder:
    """Record one rank of one engine. Statistics of everything watched; tensors of `names` (globs) alone.

    `layout` gives the degrees of parallelism (`{"tp": 2, "pp": 1}`) and `rank` this worker's number, tensor-parallel
    ranks first. `shards` says how a tensor is split over them: glob -> the axis that is cut (`-1`), or "sum" for
    partial sums; all else must be equal on every rank. `about` is kept with the recording (engine, version).
    Past `max_bytes` of tensors nothing more is kept, and the manifest names what is not whole.
    """

    def __init__(
        self,
        folder: str | Path,
        names: Sequence[str] = (),
        *,
        rank: int = 0,
        layout: Mapping[str, int] | None = None,
        shards: Mapping[str, int | str] | None = None,
        about: Mapping[str, str] | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.folder, self.names, self.rank = Path(folder), tuple(names), rank
        self.layout, self.shards, self.about = dict(layout or {}), dict(shards or {}), dict(about or {})
        self.max_bytes, self.kept_bytes = max_bytes, 0
        self.notes: dict[str, str] = {}
        self._requests: dict[str, _Request] = {}
        self._rows: list[tuple[str, list[int], list[int]]] = []
        self._count = 0
        self._pending: list[tuple[dict[str, Any], Sequence[torch.Tensor], torch.Tensor | int, torch.Tensor]] = []
        self._lines: list[_Row] = []
        self._named: dict[str, bool] = {}
        self._watched: dict[str, bool] = {}
        self._hooks: list[Any] = []
        self._forward = 0
        self._key = next(_KEYS)
        _LIVE[self._key] = self
        atexit.register(self.close)

    def tokens(
        self,
        request: str | Sequence[str],
        positions: Iterable[int] | torch.Tensor,
        ids: Iterable[int] | torch.Tensor | None = None,
    ) -> None:
        """Say whose rows the next forward holds, in their order: one request, or one for each row; positions from 0.

        A position below 0 is padding. `ids` are the token ids of the rows; without them day0 cannot ask the reference.
        """
        self._fetch()
        self._forward += 1
        where = [int(p) for p in _listed(positions)]
        owners = [request] * len(where) if isinstance(request, str) else [str(r) for r in request]
        tokens = [None] * len(where) if ids is None else [int(i) for i in _listed(ids)]
        if not len(owners) == len(where) == len(tokens):
            raise ValueError(f"expected as many requests and ids as positions ({len(where)}), found {len(owners)} and "
                             f"{len(tokens)}")  # fmt: skip
        self._count = len(where)
        groups: dict[str, tuple[list[int], list[int]]] = {}
        for row, (owner, place, token) in enumerate(zip(owners, where, tokens)):  # noqa: B905  (lengths are equal)
            if place < 0:
                continue
            rows, places = groups.setdefault(owner, ([], []))
            rows.append(row)
            places.append(place)
            state = self._requests.setdefault(owner, _Request())
            if token is not None:
                state.ids[place] = token
            state.forwards.add(self._forward)
        self._rows = [(owner, rows, places) for owner, (rows, places) in groups.items()]

    def watch(
        self, model: torch.nn.Module, mapping: Mapping[str, str] | Callable[[str], str | None] | None = None
    ) -> None:
        """Hook every module of a model; taps are named by module path, or as `mapping` says (None leaves it out).

        A further output of a module is named `NAME.out.1`. Watch before the first call of a compiled model.
        """
        rename = mapping if callable(mapping) else (lambda path: mapping.get(path)) if mapping else (lambda path: path)
        for path, module in model.named_modules():
            path = path.replace("_orig_mod.", "").removesuffix("_orig_mod")  # what a compiled module puts in between
            name = rename(path) if path else None
            if name:
                self._watched[name] = False
                self._hooks.append(module.register_forward_hook(self._hook(name)))

    def _hook(self, name: str) -> Callable[[Any, Any, Any], Any]:
        def after(module: Any, args: Any, output: Any) -> Any:
            if torch.compiler.is_compiling():
                return self._through(name, output)
            self._watched[name] = True
            for place, tensor in _tensors(output):
                self.tap(f"{name}{place}", tensor)
            return None

        return after

    def _through(self, name: str, output: Any) -> Any:
        """Send a module's outputs through the operator, inside a captured region."""
        if isinstance(output, torch.Tensor):
            return self.tap(name, output)
        if type(output) in (tuple, list):
            places = [name if i == 0 else f"{name}.out.{i}" for i in range(len(output))]
            pairs = zip(places, output)  # noqa: B905  (lengths are equal)
            return type(output)(self.tap(n, t) if isinstance(t, torch.Tensor) else t for n, t in pairs)
        return output

    def tap(
        self, name: str, tensor: torch.Tensor, *, dims: str = "", rows: Iterable[int] | torch.Tensor | None = None
    ) -> torch.Tensor:
        """Record a tensor under a name; return what to go on with.

        `dims` names the axes (`"token head feature"`). `rows` are those of the forward that the tensor holds, where it
        does not hold all of them (logits of last tokens); not inside a captured region.
        """
        if torch.compiler.is_compiling():
            return _through_operator(tensor, name, dims, self._key)
        self._observe(name, tensor, dims, None if rows is None else [int(r) for r in _listed(rows)])
        return tensor

    def _observe(self, name: str, tensor: torch.Tensor, dims: str, rows: list[int] | None = None) -> None:
        self._watched[name] = True
        if not self._rows:
            self.notes.setdefault(name, "came before tokens() said whose rows it holds: not recorded")
            return
        if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
            self.notes.setdefault(name, f"a {type(tensor).__name__}, no plain tensor: not recorded")
            return
        if _capturing(tensor):
            self.notes[name] = "inside a captured device graph: not recorded; run once without graphs"
            return
        with torch.no_grad(), torch._C.DisableTorchFunction():
            seen = tensor.detach()
            self._statistics(name, seen)
            if self._is_named(name):
                self._keep(name, seen, dims, rows)

    def _is_named(self, name: str) -> bool:
        if name not in self._named:
            self._named[name] = any(fnmatch.fnmatchcase(name, glob) for glob in self.names)
        return self._named[name]

    def _statistics(self, name: str, tensor: torch.Tensor) -> None:
        about = {
            "tap": name, "forward": self._forward, "dtype": _name(tensor.dtype), "shape": tensor.shape,
            "stride": tensor.stride(), "offset": tensor.storage_offset(), "n": tensor.numel(),
        }  # fmt: skip
        if tensor.numel():
            self._pending.append((about, *_summary(tensor)))
        if len(self._pending) >= PENDING:
            self._fetch()

    def _fetch(self) -> None:
        """Bring the statistics of a forward from the device, all in one go."""
        devices: dict[Any, list[Any]] = {}
        for row in self._pending:
            devices.setdefault(row[1][0].device, []).append(row)
        for rows in devices.values():
            numbers = _brought([n for _, four, _, _ in rows for n in four])
            sketches = _brought([sketch for _, _, _, sketch in rows])
            counted = [bad for _, _, bad, _ in rows if isinstance(bad, torch.Tensor)]
            counts = iter(torch.stack(counted).cpu().tolist() if counted else [])
            at = 0
            for place, (about, _, bad, sketch) in enumerate(rows):
                bad = next(counts) if isinstance(bad, torch.Tensor) else bad
                four, values = numbers[4 * place : 4 * place + 4], sketches[at : at + len(sketch)]
                at += len(sketch)
                self._lines.append((about, four, bad, values))
        self._pending = []
        if len(self._lines) > 64 * PENDING:
            self._spill()

    def _spill(self) -> None:
        """Append the statistics so far to their file, so that they take no memory."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"statistics-rank-{self.rank}.jsonl").open("a") as file:
            file.writelines(_line(row) for row in self._lines)
        self._lines = []

    def _keep(self, name: str, tensor: torch.Tensor, dims: str, given: list[int] | None) -> None:
        count = self._count if given is None else len(given)
        axes = tuple(dims.split()) or _axes(tensor, count)
        if "token" not in axes or len(axes) != tensor.dim():
            if dims or tensor.dim() < 2 or tensor.numel() != tensor.shape[-1] * count:
                self._keep_whole(name, tensor, axes)
                return
            tensor, axes = tensor.reshape(count, -1), ("token", "feature")  # [batch, token, feature], packed
        axis = axes.index("token")
        if tensor.shape[axis] != count:
            self.notes[name] = f"not kept: {tensor.shape[axis]} rows where {count} were announced"
            return
        held = {row: i for i, row in enumerate(range(count) if given is None else given)}
        for owner, rows, places in self._rows:
            state = self._requests[owner]
            mine = [(held[row], place) for row, place in zip(rows, places) if row in held]  # noqa: B905
            picked = [i for i, _ in mine]
            part = tensor if picked == list(range(count)) else tensor.index_select(axis, _index(picked, tensor))
            if mine and self._fits(state, name, part):
                copy = part.to("cpu", copy=True).contiguous()
                state.parts.setdefault(name, (axes, []))[1].append(([place for _, place in mine], copy))

    def _keep_whole(self, name: str, tensor: torch.Tensor, axes: tuple[str, ...]) -> None:
        """Keep a tensor without a token axis (a table, a state): the first of each request stands."""
        for owner, _, _ in self._rows:
            state = self._requests[owner]
            if name not in state.parts and self._fits(state, name, tensor):
                state.parts[name] = (axes, [([], tensor.to("cpu", copy=True).contiguous())])

    def _fits(self, state: _Request, name: str, tensor: torch.Tensor) -> bool:
        length = tensor.numel() * tensor.element_size()
        if name in state.cut or self.kept_bytes + length > self.max_bytes:
            state.cut.add(name)
            _, parts = state.parts.pop(name, ((), []))
            self.kept_bytes -= sum(t.numel() * t.element_size() for _, t in parts)
            self.notes[name] = f"not kept whole: more than max_bytes ({self.max_bytes}) in all"
            return False
        self.kept_bytes += length
        return True

    def save(self) -> list[Path]:
        """Write what is known of every request, each in place of what was there; return the folders."""
        self._fetch()
        for name, seen in self._watched.items():
            if not seen:
                self.notes.setdefault(name, "watched, but never called in a way that could be seen")
        return [self._save_one(request, state) for request, state in self._requests.items()]

    def _save_one(self, request: str, state: _Request) -> Path:
        safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in request)[:80] or "request"
        folder = self.folder / safe / f"rank-{self.rank}"
        scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        ids = [state.ids.get(i) for i in range(len(state.ids))]
        whole = [i for i in ids if i is not None]
        tensors: dict[str, tuple[tuple[str, ...], torch.Tensor]] = {}
        gaps: dict[str, str] = {}
        if whole and len(whole) == len(ids):
            tensors["inputs.token_ids"] = (("token",), torch.tensor(whole, dtype=torch.int64))
        for name, (axes, parts) in state.parts.items():
            tensor, places = _joined(axes, parts)
            tensors[name] = (axes, tensor)
            if places and places != list(range(len(places))):
                gaps[name] = f"positions {_spans(places)}"
        rows, parts_bytes = _write_parts(scratch, tensors)
        manifest = {
            "format": FORMAT,
            "digests": "blake2b",
            "setup": self._setup(tensors),
            "run": self._run(request, whole if len(whole) == len(ids) else []),
            "tensors": rows,
            "parts": parts_bytes,
            "facts": {
                "recorder": "dropin", "rank": self.rank, "layout": self.layout,
                "shards": {n: s for n in tensors if (s := self._shard(n)) is not None},
                "gaps": gaps, "notes": self.notes, "length_tokens": len(ids),
            },
            "provenance": self._provenance(),
        }  # fmt: skip
        (scratch / "manifest.json").write_text(json.dumps({**manifest, "seal": _seal(manifest)}))
        mine = [row for row in self._lines if row[0]["forward"] in state.forwards]
        (scratch / "statistics.jsonl").write_text("".join(_line(row) for row in mine))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(scratch, folder)
        return folder

    def _setup(self, tensors: Mapping[str, tuple[tuple[str, ...], torch.Tensor]]) -> dict[str, Any]:
        kinds = [_name(t.dtype) for _, t in tensors.values() if t.is_floating_point()]
        usual = max(set(kinds), key=kinds.count) if kinds else "bfloat16"
        layout = {k: int(v) for k, v in self.layout.items() if k in ("tp", "ep", "pp", "sp")}
        return {"side": "accel", "role": "accel", "adapter": "dropin", "dtype": usual, "layout": layout}

    def _run(self, request: str, ids: list[int]) -> dict[str, Any]:
        case: dict[str, Any] = {"id": request, "kind": "text", "source": "recorded"}
        if ids:
            case["token_ids"] = ids
        return {"id": f"recorded/{request}", "stage": "text", "kind": "forward", "case": case}

    def _shard(self, name: str) -> int | str | None:
        return next((how for glob, how in self.shards.items() if fnmatch.fnmatchcase(name, glob)), None)

    def _provenance(self) -> dict[str, str]:
        return {
            **{str(k): str(v) for k, v in self.about.items()},
            "recorder": f"dropin {VERSION}", "version.torch": torch.__version__,
            "version.python": platform.python_version(), "machine": f"{platform.machine()} {platform.system()}",
 "command": Path(sys.argv[0]).name if sys.argv else "",
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }  # fmt: skip

    def close(self) -> None:
        """Save, and take every hook off. A second call does nothing."""
        if _LIVE.pop(self._key, None) is None:
            return
        atexit.unregister(self.close)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.save()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Request:
    """What is known of one request: token ids by position, and by tap its axes and parts (positions, rows)."""

    def __init__(self) -> None:
        self.ids: dict[int, int] = {}
        self.parts: dict[str, tuple[tuple[str, ...], list[tuple[list[int], torch.Tensor]]]] = {}
        self.cut: set[str] = set()
        self.forwards: set[int] = set()


def _operator(tensor: torch.Tensor, name: str, dims: str, key: int) -> torch.Tensor:
    """Record inside a captured region; an operator may not return its input, so this is a copy of it."""
    if key in _LIVE:
        _LIVE[key]._observe(name, tensor, dims)
    return tensor.clone(memory_format=torch.preserve_format)


def _like(tensor: torch.Tensor, name: str, dims: str, key: int) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.preserve_format)


def _made_operator() -> Callable[[torch.Tensor, str, str, int], torch.Tensor]:
    """Return what records inside a captured region: an operator, or a break of the graph where torch has none."""
    if not hasattr(torch.library, "custom_op"):
        disable: Any = torch.compiler.disable
        return disable(_operator)  # type: ignore[no-any-return]
    schema = "(Tensor tensor, str name, str dims, int key) -> Tensor"
    made = torch.library.custom_op("day0_dropin::tap", _operator, mutates_args=(), schema=schema)
    made.register_fake(_like)
    made.register_autograd(lambda context, gradient: (gradient, None, None, None))
    return made


_through_operator = _made_operator()


def _tensors(output: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a module's output with the ending of their names."""
    if isinstance(output, torch.Tensor):
        return [("", output)]
    items = list(output.values()) if isinstance(output, Mapping) else output
    if not isinstance(items, (tuple, list)):
        return []
    return [("" if i == 0 else f".out.{i}", t) for i, t in enumerate(items) if isinstance(t, torch.Tensor)]


def _summary(tensor: torch.Tensor) -> tuple[Sequence[torch.Tensor], torch.Tensor | int, torch.Tensor]:
    """Return sum, sum of squares, least and greatest, how many are not finite, and a sketch; all on the device.

    Counting costs more than all the rest on a CPU and is done there only where a sum says that there is something to
    count; asking that would wait for an accelerator, where counting is cheap.
    """
    wide = _widened(tensor)
    least, greatest = torch.aminmax(wide)
    squares = torch.dot(wide, wide)
    bad: torch.Tensor | int = 0
    if tensor.device.type != "cpu" or not math.isfinite(squares.item()):
        bad = torch.isfinite(wide).logical_not().sum()
    sketch = wide[:: max(1, wide.numel() // SAMPLES) | 1][:SAMPLES].clone()
    return (wide.sum(), squares, least, greatest), bad, sketch


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in a row, in float32 at least; those of 16 bits in memory that the next ones overwrite."""
    if tensor.dtype in (torch.bfloat16, torch.float16) and tensor.device.type == "cpu" and tensor.numel() <= WIDENED:
        if not hasattr(_SCRATCH, "held"):
            with torch.inference_mode(False):  # or it could be written into under inference mode alone
                _SCRATCH.held = torch.empty(WIDENED, dtype=torch.float32, device="cpu")
        wide: torch.Tensor = _SCRATCH.held[: tensor.numel()]
        wide.view(tensor.shape).copy_(tensor)
        return wide
    flat = tensor.reshape(-1)
    return flat if flat.dtype in (torch.float32, torch.float64) else flat.float()


def _brought(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the values of small tensors, one after the other, each kind of them widened at once."""
    if any(t.dtype is not tensors[0].dtype for t in tensors):
        tensors = [t.float() for t in tensors]
    values: list[float] = torch.cat([t.reshape(-1) for t in tensors]).float().tolist()
    return values


_Row = tuple[dict[str, Any], Sequence[float], int, Sequence[float]]


def _line(row: _Row) -> str:
    """Return the statistics of one tap in one forward as a line of JSON."""
    about, (total, squares, least, greatest), bad, sketch = row
    numbers = {"mean": total / about["n"], "rms": (squares / about["n"]) ** 0.5, "min": least, "max": greatest}
    told = {**about, **{k: _plain(v) for k, v in numbers.items()}}
    return json.dumps({**told, "nonfinite": bad, "sketch": [_plain(v) for v in sketch]}) + "\n"


def _index(places: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(places, dtype=torch.int64, device=like.device)


def _capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _axes(tensor: torch.Tensor, count: int) -> tuple[str, ...]:
    """Name the axes by the number of rows: the token axis is the first that has them, behind a batch of one."""
    names = [f"axis{i}" for i in range(tensor.dim())]
    order = [1, 0, 2, 3] if tensor.dim() >= 2 and tensor.shape[0] == 1 != count else [0, 1, 2, 3]
    place = next((i for i in order if i < tensor.dim() and tensor.shape[i] == count), None)
    if place is None or count == 0:
        return tuple(names)
    names[place] = "token"
    if place == 1 and tensor.shape[0] == 1:
        names[0] = "batch"
    if place < tensor.dim() - 1:
        names[-1] = "feature"
    if tensor.dim() - place == 3:
        names[place + 1] = "head"
    return tuple(names)


def _joined(axes: tuple[str, ...], parts: list[tuple[list[int], torch.Tensor]]) -> tuple[torch.Tensor, list[int]]:
    """Put the parts of a request in the order of their positions; where one comes again, the last stands."""
    if not parts[0][0]:
        return parts[0][1], []
    axis = axes.index("token")
    place = {p: (number, row) for number, (places, _) in enumerate(parts) for row, p in enumerate(places)}
    order = sorted(place)
    if len(parts) == 1 and order == parts[0][0]:
        return parts[0][1], order
    rows = [parts[place[p][0]][1].select(axis, place[p][1]) for p in order]
    return torch.stack(rows, dim=axis).contiguous(), order


def _spans(places: Sequence[int]) -> str:
    """Return positions as spans: `16-31, 40-40`."""
    starts = [p for i, p in enumerate(places) if i == 0 or places[i - 1] != p - 1]
    ends = [p for i, p in enumerate(places) if i == len(places) - 1 or places[i + 1] != p + 1]
    return ", ".join(f"{a}-{b}" for a, b in zip(starts, ends))  # noqa: B905  (lengths are equal)


def _write_parts(
    folder: Path, tensors: Mapping[str, tuple[tuple[str, ...], torch.Tensor]]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Write tensors into bounded safetensors files, equal ones once; return the manifest's rows and file sizes."""
    rows: list[dict[str, Any]] = []
    seen: dict[str, tuple[str, str]] = {}
    sizes: dict[str, int] = {}
    part: dict[str, torch.Tensor] = {}
    length = 0
    for name, (axes, tensor) in tensors.items():
        digest = _digest(tensor)
        if digest not in seen:
            size = tensor.numel() * tensor.element_size()
            if part and length + size > PART_BYTES:
                sizes[f"part-{len(sizes) + 1:04d}.safetensors"] = _write(folder, len(sizes) + 1, part)
                part, length = {}, 0
            seen[digest] = (f"part-{len(sizes) + 1:04d}.safetensors", name)
            part[name] = tensor
            length += size
        file, key = seen[digest]
        rows.append({
            "tap": {"name": name, "kind": _KINDS.get(name, "hidden"), "dims": list(axes)}, "file": file,
            "key": key, "dtype": _name(tensor.dtype), "shape": list(tensor.shape), "digest": digest,
        })  # fmt: skip
    if part:
        sizes[f"part-{len(sizes) + 1:04d}.safetensors"] = _write(folder, len(sizes) + 1, part)
    return rows, sizes


def _write(folder: Path, number: int, tensors: Mapping[str, torch.Tensor]) -> int:
    """Write one safetensors file: eight bytes of header length, a JSON header, the tensors' bytes. Returns its size.

    Source: the format's README, https://github.com/huggingface/safetensors.
    """
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        kind = _DTYPES[_name(tensor.dtype)]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path = folder / f"part-{number:04d}.safetensors"
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in tensors.values():
            file.write(_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())
    return path.stat().st_size


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in memory, without numpy."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())) if size else memoryview(b"")


def _digest(tensor: torch.Tensor) -> str:
    """Return the digest of dtype, shape and bytes that day0 checks."""
    head = f"{_name(tensor.dtype)}|{','.join(str(n) for n in tensor.shape)}|".encode()
    digest = hashlib.blake2b(head, digest_size=16)
    digest.update(_bytes(tensor))
    return digest.hexdigest()


def _seal(manifest: Mapping[str, Any]) -> str:
    text = json.dumps(json.loads(json.dumps(manifest)), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(json.dumps(text).encode(), digest_size=16).hexdigest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plain(value: float) -> float | str:
    """Return a number as JSON can hold it."""
    return value if value - value == 0 else str(value)


def _listed(values: Iterable[int] | torch.Tensor) -> list[int]:
    return values.reshape(-1).tolist() if isinstance(values, torch.Tensor) else list(values)
