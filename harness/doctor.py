"""`day0 doctor`: what this machine is and what day0 can do on it. Knows versions and devices; must judge nothing."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

Rows = list[tuple[str, str]]

CORE = ("day0", "torch", "numpy", "safetensors", "pydantic", "typer", "rich", "jinja2", "tokenizers", "psutil")
EXTRAS = {
    "transformers": "hf: SPECs, real checkpoints (pip install 'day0[hf]')",
    "PIL": "pictures of the image stage",
    "fastapi": "the built-in port's server",
    "httpx": "openai: and serve: SPECs",
    "onnxruntime": "the ONNX Runtime port of examples/",
    "pytest": "the test suite (pip install 'day0[test]')",
}


def describe() -> dict[str, Rows]:
    """Return headings and rows of name and text. Nothing in here fails: what cannot be asked is said in words."""
    return {
        "versions": [("python", f"{platform.python_version()} ({sys.executable})"), *((n, _version(n)) for n in CORE)],
        "optional": [(name, f"{_has(name)}; {what}") for name, what in EXTRAS.items()],
        "machine": _machine(),
        "devices": _devices(),
        "distributed": _distributed(),
        "can do here": _abilities(),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _has(module: str) -> str:
    return "installed" if importlib.util.find_spec(module) is not None else "missing"


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


def _machine() -> Rows:
    rows = [("system", f"{platform.system()} {platform.machine()}"), ("cpus", str(os.cpu_count() or "unknown"))]
    if importlib.util.find_spec("psutil") is not None:
        import psutil

        memory = psutil.virtual_memory()
        rows.append(("memory", f"{_size(memory.total)}, {_size(memory.available)} free"))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "day0"
    there = next(p for p in (cache, *cache.parents) if p.exists())
    rows.append(
        (
            "cache folder",
            f"{cache} ({'there' if cache.exists() else 'not yet'}, {_size(shutil.disk_usage(there).free)} free)",
        )
    )
    return rows


def _devices() -> Rows:
    if importlib.util.find_spec("torch") is None:
        return [("torch", "missing: nothing can be verified here")]
    import torch

    rows = [("cpu", f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")]
    accelerator = getattr(torch, "accelerator", None)  # torch >= 2.6
    device = accelerator.current_accelerator() if accelerator is not None else None
    if device is None:
        return [*rows, ("accelerator", "none")]
    count = accelerator.device_count() if accelerator is not None else 0
    for index in range(count):
        rows.append((f"{device.type}:{index}", _device_name(device.type, index)))
    return rows if count else [*rows, (device.type, "torch is built for it, but no device is visible")]


def _device_name(kind: str, index: int) -> str:
    import torch

    module = getattr(torch, kind, None)
    name = getattr(module, "get_device_name", None)
    info = getattr(module, "mem_get_info", None)
    parts = [str(name(index))] if name is not None else []
    if info is not None:
        free, total = info(index)
        parts.append(f"{_size(total)}, {_size(free)} free")
    return ", ".join(parts) or "no name given"


def _distributed() -> Rows:
    if importlib.util.find_spec("torch") is None:
        return []
    import torch.distributed as dist

    if not dist.is_available():
        return [("torch.distributed", "not built in: the multi_card stage cannot run ranks here")]
    backends = {
        "gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available(),
    }  # fmt: skip
    return [("backends", ", ".join(name for name, there in backends.items() if there) or "none")]


def _abilities() -> Rows:
    torch_there = importlib.util.find_spec("torch") is not None
    hf = importlib.util.find_spec("transformers") is not None
    return [
        ("built-in pair", "yes: day0 verify --stage all" if torch_there else "no: torch is missing"),
        ("transformers folders", "yes: --reference hf:PATH" if hf else "no: pip install 'day0[hf]'"),
        ("your own port", "yes: day0 init, then --accel port.py:port" if torch_there else "no: torch is missing"),
        ("compare traces", "yes: day0 compare ACTUAL_DIR EXPECTED_DIR" if torch_there else "no: torch is missing"),
    ]
