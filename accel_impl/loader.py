"""Loading: from shards to what memory holds, with facts. Knows forms and names; must not know how a model computes.

Threads read shards ahead, a bounded number of parameters; one converts. MXFP4 experts are decoded into one workspace,
reused for every matrix of every layer, and kept as FP8 with power-of-two scales; linears stay in the FP8 that the
checkpoint declares; everything else is in the port's dtype. The workspace lies where the conversion runs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from accel_impl import formats, ops
from accel_impl.backend import BackendAdapter
from accel_impl.config import Config
from accel_impl.formats import Plain, Resident
from accel_impl.parallel import Place
from accel_impl.plan import AHEAD, EXACT, FP8, MXFP4, Param, known_names, memory_plan, params, stored_names
from accel_impl.shards import Shards
from harness.errors import CheckpointError, SpecError, nearest

ORDERS = ("forward", "reverse")


@dataclass(slots=True, kw_only=True)
class Workspace:
    """The one buffer that conversions share. Nothing in it outlives a conversion. `use` says who decodes into it."""

    buffer: Tensor
    use: BackendAdapter
    poison: bool = False

    def take(self, rows: int, cols: int) -> Tensor:
        """Return the buffer's beginning as a [rows, cols] matrix; what lies in it is left over."""
        if self.poison:
            self.buffer.fill_(float("nan"))
        return self.buffer[: rows * cols].view(rows, cols)


@dataclass(slots=True, kw_only=True)
class Ledger:
    """Bytes that loading holds, and the most it ever held."""

    held: int = 0
    peak: int = 0

    def add(self, nbytes: int) -> None:
        """Count bytes taken (or given back, if negative)."""
        self.held += nbytes
        self.peak = max(self.peak, self.held)


@dataclass(slots=True, kw_only=True)
class Loaded:
    """The weights of one rank by checkpoint name (`.weight` of a quantised one stands for it and its scales)."""

    weights: dict[str, Resident]
    facts: Mapping[str, Any]
    lossy: Mapping[str, int] = field(default_factory=dict)


def load(
    shards: Shards, config: Config, place: Place, dtype: torch.dtype, *, order: str = "forward", poison: bool = False,
    device: torch.device | str = "cpu", use: BackendAdapter | None = None,
) -> Loaded:  # fmt: skip
    """Load this rank's part of a checkpoint onto a device; a kernel of the device's own converts there.

    `order` is the order in which parameters are visited; `poison` fills the workspace with NaN before each use.
    Raises CheckpointError for a parameter that is absent or of another shape or dtype.
    """
    if order not in ORDERS:
        raise SpecError(f"option visit: expected {', '.join(ORDERS)}, found {order!r}{nearest(order, list(ORDERS))}")
    wanted = list(params(config, place))
    _check(shards, wanted)
    plan = memory_plan(config, place, dtype)
    ledger = Ledger()
    use = use or BackendAdapter()
    home = device if use.table["mxfp4.decode"] == "triton" else "cpu"
    workspace = Workspace(buffer=torch.empty(plan.workspace_bytes // 4, device=home), use=use, poison=poison)
    ledger.add(plan.workspace_bytes)
    weights: dict[str, Resident] = {}
    lossy: dict[str, int] = {}
    visited = wanted if order == "forward" else wanted[::-1]
    for param, raw in _read_ahead(shards, visited, ledger):
        resident, lost = _resident(param, raw, config, workspace, dtype)
        weights[param.name] = resident.to(device)
        if lost:
            lossy[param.name] = lost
        ledger.add(resident.nbytes)
        del raw, resident
        ledger.add(-_nbytes(shards, param))
    facts = {
        "peak_bytes": ledger.peak,
        "planned_bytes": plan.peak_bytes,
        "resident_bytes": ledger.held - plan.workspace_bytes,
        "resident_planned_bytes": plan.resident_bytes,
        "workspace_bytes": plan.workspace_bytes,
        "unused": sorted(set(shards.entries) - known_names(config)),
        "unfilled": sorted({p.name for p in wanted} - set(weights)),
        "parameters": len(weights),
        "lossy_blocks": dict(lossy),
    }
    return Loaded(weights=weights, facts=facts, lossy=lossy)


def _read_ahead(
    shards: Shards, wanted: Sequence[Param], ledger: Ledger
) -> Iterator[tuple[Param, Mapping[str, Tensor]]]:
    """Yield each parameter with its tensors as they lie on disk, while those after it are being read.

    Bytes count from the moment that reading is asked for; whoever takes them counts them off.
    """
    waiting: deque[tuple[Param, Future[dict[str, Tensor]]]] = deque()

    def read(param: Param) -> dict[str, Tensor]:
        return {name: shards.read(name) for name in stored_names(param)}

    with ThreadPoolExecutor(AHEAD, thread_name_prefix="shards") as readers:
        for param in wanted:
            if len(waiting) == AHEAD:
                yield waiting[0][0], waiting.popleft()[1].result()  # no name keeps what was read
            ledger.add(_nbytes(shards, param))
            waiting.append((param, readers.submit(read, param)))
        while waiting:
            yield waiting[0][0], waiting.popleft()[1].result()


def _nbytes(shards: Shards, param: Param) -> int:
    return sum(shards.entries[name].nbytes for name in stored_names(param))


def _check(shards: Shards, wanted: list[Param]) -> None:
    """Hold every wanted tensor against the headers before anything is read."""
    missing = [name for param in wanted for name in stored_names(param) if name not in shards.entries]
    if missing:
        raise CheckpointError(
            f"expected {len(missing)} more tensors in {shards.folder}, first {missing[0]!r}; "
            f"nothing in the port may stay unfilled"
        )
    for param in wanted:
        for name, shape in param.stored.items():
            if shards.entries[name].shape != shape:
                raise CheckpointError(f"expected {name!r} of shape {shape}, found {shards.entries[name].shape}")


def _resident(
    param: Param, raw: Mapping[str, Tensor], config: Config, workspace: Workspace, dtype: torch.dtype
) -> tuple[Resident, int]:
    """Turn what was read into what stays; return it and the number of blocks that lost something."""
    if param.form == FP8:
        return _fp8(param, raw, config), 0
    if param.form == MXFP4:
        return convert_expert(param, raw, workspace)
    return Plain(tensor=_plain(param, raw[param.name], torch.float32 if param.form == EXACT else dtype)), 0


def _plain(param: Param, stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy this rank's rows and columns once, straight into what stays."""
    held = torch.empty(param.local, dtype=dtype)
    at = 0
    for rows in param.rows or (range(stored.shape[0]),):
        part = stored[rows.start : rows.stop]
        held[at : at + len(rows)] = part[:, param.cols.start : param.cols.stop] if param.cols is not None else part
        at += len(rows)
    return held


def _fp8(param: Param, raw: Mapping[str, Tensor], config: Config) -> Resident:
    q, scale = raw[param.name], raw[stored_names(param)[1]]
    grid = tuple(math.ceil(n / b) for n, b in zip(param.shape, config.block, strict=True))
    if q.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32 or tuple(scale.shape) != grid:
        raise CheckpointError(
            f"expected {param.name!r} in e4m3 with float32 scales {grid}, "
            f"found {q.dtype} with {scale.dtype} {tuple(scale.shape)}"
        )
    rows = param.rows[0] if param.rows else range(q.shape[0])
    cols = param.cols if param.cols is not None else range(q.shape[1])
    return formats.fp8_shard(q, scale, config.block, rows, cols)


def convert_expert(param: Param, raw: Mapping[str, Tensor], workspace: Workspace) -> tuple[Resident, int]:
    """Convert one MXFP4 matrix (this rank's rows and whole 32-blocks of columns) to FP8 through the workspace."""
    packed, scale = raw[f"{param.name}_packed"], raw[f"{param.name}_scale"]
    if param.rows:
        (rows,) = param.rows
        packed, scale = packed[rows.start : rows.stop], scale[rows.start : rows.stop]
    if param.cols is not None:
        start, stop = param.cols.start, param.cols.stop
        packed = packed[:, start // 2 : stop // 2]
        scale = scale[:, start // formats.MX_BLOCK : stop // formats.MX_BLOCK]
    out = workspace.take(*param.local)
    values = ops.decode_mxfp4(workspace.use, packed.to(out.device), scale.to(out.device), out)
    return formats.fp8_from_values(values)
