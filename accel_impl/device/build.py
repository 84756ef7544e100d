"""Sources -> a shared library in the user's cache. Knows the compiler and torch's headers; must not know the device.

The library lies under a digest of its sources, torch's version and the compiler's, so that a change of any builds anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

from harness.errors import SpecError

SOURCES = ("pocket.cpp", "pocket.h", "memory.h", "kernels.h")
FLAGS = ("-O1", "-shared", "-fPIC", "-std=c++20", "-w")
OLDEST = (2, 9)
"""First version whose interface of a device allocator the sources fit. They are tested on torch 2.13."""


def library() -> Path:
    """Return the shared library, built now if it is not in the cache.

    Raises:
        SpecError: torch is too old, there is no compiler, or it refuses the sources.
    """
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise SpecError(f"the device pocket needs torch {wanted} or newer, found {torch.__version__}")
    compiler = os.environ.get("CXX") or "g++"
    place = shutil.which(compiler)
    if place is None:
        raise SpecError(
            f"the device pocket is built on demand and needs a C++ compiler, found no {compiler!r}; "
            "install g++, or name another one in CXX"
        )
    command = _command(place)
    folder = _cache() / _digest(command, place)
    target = folder / "pocket.so"
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process builds, others wait for it
            if not target.is_file():
                _compile(command, target)
    return target


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "day0" / "device"


def _command(compiler: str) -> list[str]:
    from torch.utils.cpp_extension import include_paths, library_paths

    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    includes = [f"-I{path}" for path in include_paths()]
    libraries = [f"-L{path}" for path in library_paths()]
    source = str(Path(__file__).parent / SOURCES[0])
    return [compiler, *FLAGS, abi, *includes, source, *libraries, "-lc10", "-ltorch_cpu", "-ltorch"]


def _digest(command: list[str], compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    seen = hashlib.sha256("\n".join([*command, version, torch.__version__]).encode())
    for name in SOURCES:
        seen.update((Path(__file__).parent / name).read_bytes())
    return seen.hexdigest()[:16]


def _compile(command: list[str], target: Path) -> None:
    made = target.with_suffix(f".{os.getpid()}")
    done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()][:8]
        raise SpecError(
            f"the device pocket cannot be built with {command[0]} for torch {torch.__version__}:\n" + "\n".join(errors)
        )
    made.replace(target)
