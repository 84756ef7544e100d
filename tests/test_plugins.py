"""SPEC strings: what they parse to, and how each mistake is told."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from harness.adapters.module import ModuleAdapter
from harness.errors import PortError, SpecError
from harness.plugins import Spec, default_checkpoint, open_adapter, parse_spec
from harness.types import Setup
from tests.adapters.foreign import folder

SETUP = Setup(side="accel", role="accel", adapter="x")


def test_kinds() -> None:
    """Every kind of SPEC parses to its target and options; URLs and commands keep their question marks."""
    assert parse_spec("builtin:accel") == Spec(kind="builtin", target="accel")
    assert parse_spec("hf:a/b?dtype=bfloat16&attn=eager") == Spec(
        kind="hf", target="a/b", options={"dtype": "bfloat16", "attn": "eager"}
    )
    assert parse_spec("dir/port.py:make?k=v").options == {"k": "v"}
    assert parse_spec("dir/port.py:make").target == "dir/port.py:make"
    assert parse_spec("pkg.mod:make") == Spec(kind="factory", target="pkg.mod:make")
    assert parse_spec("openai:http://127.0.0.1:8000/v1?x=1").target == "http://127.0.0.1:8000/v1?x=1"
    assert parse_spec("serve:run --port {port}?").target == "run --port {port}?"
    assert parse_spec("traces:goldens/a").kind == "traces"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("reference", "expected KIND:TARGET"),
        ("builtn:accel", "did you mean 'builtin'"),
        ("hf:", "expected KIND:TARGET"),
        ("hf:x?dtype", "key=value"),
        ("hf:x?a=1&a=2", "each option once"),
        ("port.py:no name", "name of a function"),
        ("a-b:c", "valid: builtin"),
    ],
)
def test_mistakes(text: str, words: str) -> None:
    """A SPEC that cannot be parsed says what was expected."""
    with pytest.raises(SpecError, match=words):
        parse_spec(text)


def write(path: Path, code: str) -> str:
    path.write_text(textwrap.dedent(code))
    return f"{path}:make"


def test_factories(tmp_path: Path) -> None:
    """A factory's module is wrapped, its adapter is taken as it is; anything else is refused by what it lacks."""
    checkpoint = folder(tmp_path / "model")
    module = """
        from torch import nn
        class Port(nn.Module):
            def forward(self, input_ids): ...
        def make(checkpoint, setup):
            return Port()
    """
    adapter = open_adapter(parse_spec(write(tmp_path / "good.py", module)), checkpoint, SETUP)
    assert isinstance(adapter, ModuleAdapter)
    nothing = parse_spec(write(tmp_path / "none.py", "def make(checkpoint, setup): return 3"))
    with pytest.raises(SpecError, match="found int without load, prepare"):
        open_adapter(nothing, checkpoint, SETUP)
    with pytest.raises(SpecError, match="expected a checkpoint"):
        open_adapter(nothing, None, SETUP)


def test_who_is_to_blame(tmp_path: Path) -> None:
    """What cannot be imported is a usage error with its traceback; what the factory raises is the port's failure."""
    checkpoint = folder(tmp_path / "model")
    broken = parse_spec(write(tmp_path / "broken.py", "import no_such_package_at_all"))
    with pytest.raises(SpecError, match=r"no_such_package_at_all(.|\n)*File .*broken.py") as caught:
        open_adapter(broken, checkpoint, SETUP)
    assert caught.value.exit_code == 4
    raising = parse_spec(write(tmp_path / "raising.py", "def make(checkpoint, setup): raise ValueError('no kernel')"))
    with pytest.raises(PortError, match="no kernel") as refused:
        open_adapter(raising, checkpoint, SETUP)
    assert refused.value.exit_code == 1
    with pytest.raises(SpecError, match="did you mean 'make'"):
        open_adapter(Spec(kind="factory", target=f"{tmp_path / 'raising.py'}:mak"), checkpoint, SETUP)
    with pytest.raises(SpecError, match="Python file"):
        open_adapter(parse_spec(f"{tmp_path / 'absent.py'}:make"), checkpoint, SETUP)


def test_checkpoints(tmp_path: Path) -> None:
    """hf: names its own folder, which must be one; a factory names none."""
    made = folder(tmp_path / "model")
    assert default_checkpoint(parse_spec(f"hf:{made}?dtype=float32")) == made.resolve()
    assert default_checkpoint(parse_spec("port.py:make")) is None
    with pytest.raises(SpecError, match="nothing there"):
        default_checkpoint(parse_spec(f"hf:{tmp_path / 'absent'}"))
    with pytest.raises(SpecError, match="unknown builtin 'refrence'"):
        open_adapter(parse_spec("builtin:refrence"), made, SETUP)
