"""SPEC strings and entry points -> adapters. Knows the kinds of SPEC; must not know stages or limits.

builtin:NAME                    an entry point of the group `day0.adapters`, called as `(checkpoint, setup)`
hf:PATH?dtype=..&attn=..        a transformers folder
FILE.py:factory?key=value       a function `factory(checkpoint, setup)` of a file, or of an importable module
package.module:factory
openai:URL    serve:COMMAND     an OpenAI-compatible endpoint, or a command that starts one
traces:DIR?map=FILE             recorded traces, with a mapping of their names
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl

from harness.adapter import Adapter
from harness.devices import enabled
from harness.errors import Day0Error, PortError, SpecError, nearest
from harness.types import Setup

KINDS = ("builtin", "hf", "openai", "serve", "traces")
_METHODS = ("load", "prepare", "forward", "generate", "close")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A parsed SPEC. `kind` is one of `KINDS`, or `factory`; `options` are the query keys, as strings."""

    kind: str
    target: str
    options: Mapping[str, str] = field(default_factory=dict)


def parse_spec(text: str) -> Spec:
    """Parse a SPEC string. Raises SpecError where it names no known kind or its query is malformed."""
    head, mark, rest = text.strip().partition(":")
    if not mark or not head or not rest:
        hint = ""
        if head.endswith(".py"):
            hint = f" (did you mean '{head}:port', the name of your function after the colon?)"
        elif (Path(head).expanduser() / "config.json").is_file():
            hint = f" (did you mean 'hf:{head}'?)"
        raise SpecError(f"expected KIND:TARGET, FILE.py:factory or package.module:factory, found {text!r}{hint}")
    if head == "openai" and not rest.startswith(("http://", "https://")):
        raise SpecError(f"expected a URL like openai:http://127.0.0.1:8000/v1, found {text!r}")
    if head in ("openai", "serve"):
        return Spec(kind=head, target=rest)  # a URL or a command may hold question marks of its own
    if head in KINDS:
        target, options = _query(rest, text)
        return Spec(kind=head, target=target, options=options)
    body, options = _query(text.strip(), text)
    place, _, name = body.rpartition(":")
    is_file = place.endswith(".py")
    if not is_file and not all(part.isidentifier() for part in place.split(".")):
        raise SpecError(f"expected a SPEC of a known kind, found {head!r} in {text!r}{nearest(head, list(KINDS))}")
    if not is_file and "." not in place and nearest(head, list(KINDS)).startswith(" (did you mean"):
        raise SpecError(f"expected a SPEC of a known kind, found {head!r} in {text!r}{nearest(head, list(KINDS))}")
    if not name.isidentifier():
        raise SpecError(f"expected the name of a function after the colon, found {name!r} in {text!r}")
    return Spec(kind="factory", target=body, options=options)


def default_checkpoint(spec: Spec) -> Path | None:
    """Return the checkpoint that a SPEC itself names: the folder of hf:, what a builtin makes; None otherwise."""
    if spec.kind == "hf":
        return _folder(spec.target)
    if spec.kind == "builtin":
        found = [e for e in _entries("day0.checkpoints") if e.name in (spec.target, "builtin")]
        if found:
            best = next((e for e in found if e.name == spec.target), found[0])
            return Path(_imported(best.load, f"entry point {best.value} of day0.checkpoints")())
    return None


def open_adapter(spec: Spec, checkpoint: Path | None, setup: Setup) -> Adapter:
    """Create the adapter that a SPEC names; weights may not be loaded yet.

    Raises:
        SpecError: it cannot be imported, is not an adapter, or lacks a checkpoint.
        PortError: the factory itself raised.
    """
    setup = enabled(setup)
    if spec.kind in ("openai", "serve"):
        server = _imported(lambda: importlib.import_module("harness.adapters.server"), "harness.adapters.server")
        start = server.openai if spec.kind == "openai" else server.serve
        return _checked(_called(start, spec.target), spec, checkpoint, setup)
    if spec.kind == "traces":
        traces = importlib.import_module("harness.adapters.traces")
        return _checked(traces.open_traces(Path(spec.target).expanduser(), checkpoint, setup), spec, checkpoint, setup)
    if spec.kind == "hf":
        hf = _imported(lambda: importlib.import_module("harness.adapters.hf"), "harness.adapters.hf")
        return _checked(hf.hf_adapter(_folder(spec.target), setup), spec, checkpoint, setup)
    if checkpoint is None:
        raise SpecError(f"expected a checkpoint for {spec.target!r}, found none; name one with --reference hf:PATH")
    return _checked(_called(_factory(spec), checkpoint, setup), spec, checkpoint, setup)


def _query(text: str, whole: str) -> tuple[str, dict[str, str]]:
    target, mark, query = text.partition("?")
    if not mark:
        return target, {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
    except ValueError as error:
        raise SpecError(f"expected ?key=value&key=value, found {query!r} in {whole!r}") from error
    repeated = sorted({k for k, _ in pairs if [p[0] for p in pairs].count(k) > 1})
    if repeated or not target:
        raise SpecError(f"expected each option once and a target before '?', found {repeated or query!r} in {whole!r}")
    return target, dict(pairs)


def _folder(target: str) -> Path:
    path = Path(target).expanduser()
    if not (path / "config.json").is_file():
        what = "a folder without config.json" if path.is_dir() else "nothing there"
        raise SpecError(f"expected a transformers checkpoint folder at {path}, found {what}; check the path")
    return path.resolve()


def _entries(group: str) -> list[importlib.metadata.EntryPoint]:
    return list(importlib.metadata.entry_points(group=group))


def _factory(spec: Spec) -> Callable[..., Any]:
    """Import the function that makes an adapter."""
    if spec.kind == "builtin":
        entries = {e.name: e for e in _entries("day0.adapters")}
        if spec.target not in entries:
            raise SpecError(f"unknown builtin {spec.target!r}{nearest(spec.target, list(entries))}")
        return _imported(entries[spec.target].load, f"entry point {entries[spec.target].value}")  # type: ignore[no-any-return]
    place, _, name = spec.target.rpartition(":")
    load = (lambda: _from_file(Path(place))) if place.endswith(".py") else (lambda: importlib.import_module(place))
    module = _imported(load, place)
    found = getattr(module, name, None)
    if not callable(found):
        functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise SpecError(f"expected a function {name!r} in {place}, found none{nearest(name, functions)}")
    return found  # type: ignore[no-any-return]


def _from_file(path: Path) -> ModuleType:
    """Import a file under a name of its own; its folder is importable, as for a script."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise SpecError(f"expected a Python file at {path}, found nothing; check the path")
    name = f"day0_port_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise SpecError(f"expected a Python file at {path}, found one that cannot be imported")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    found.loader.exec_module(module)
    return module


def _imported(load: Callable[[], Any], what: str) -> Any:
    """Run an import; whatever goes wrong is the user's word for it, with its traceback."""
    try:
        return load()
    except Day0Error:
        raise
    except (Exception, SystemExit) as error:  # the side under test: its imports may do anything
        if isinstance(error, ModuleNotFoundError) and error.name and f"{what}.".startswith(f"{error.name}."):
            raise SpecError(
                f"expected an importable module {what}, found no module named {error.name!r}; "
                "install it, put its folder on PYTHONPATH, or name a file: FILE.py:factory"
            ) from error
        raise SpecError(f"{what} cannot be imported: {error!r}\n{_frames(error)}") from error


def _frames(error: BaseException) -> str:
    """Return the traceback of the user's own code: the import machinery and this file are left out."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename != __file__ and "importlib" not in f.filename]
    return "".join([*traceback.format_list(own), *traceback.format_exception_only(type(error), error)])


def _called(factory: Callable[..., Any], *given: Any) -> Any:
    """Call a factory; what it raises is the port's failure."""
    try:
        return factory(*given)
    except (Day0Error, MemoryError):
        raise
    except Exception as error:  # the side under test
        name = getattr(factory, "__name__", repr(factory))
        raise PortError(f"the port's factory {name} raised {error!r}") from error


def _checked(found: Any, spec: Spec, checkpoint: Path | None, setup: Setup) -> Adapter:
    """Wrap a module; anything else must be an adapter."""
    import torch

    if isinstance(found, torch.nn.Module):
        from harness.adapters.module import ModuleAdapter

        assert checkpoint is not None
        if setup.options.get("stream") == "1":
            from harness.adapters.stream import streamed_module

            return streamed_module(found, checkpoint, setup, name=spec.target)
        return ModuleAdapter(found, checkpoint, setup, name=spec.target)
    missing = [m for m in _METHODS if not callable(getattr(found, m, None))]
    missing += [a for a in ("name", "scope") if not hasattr(found, a)]
    if missing:
        raise SpecError(
            f"expected {spec.target} to give a torch.nn.Module or an adapter, found {type(found).__name__} without "
            f"{', '.join(missing)}; see harness/adapter.py"
        )
    return found  # type: ignore[no-any-return]
