"""What a port may say of its numbers, and what is said of words that it may not."""

from __future__ import annotations

import pytest

from harness.config import load_config
from harness.errors import ConfigError, SpecError
from harness.plan import declared
from harness.precision.scheme import KEEP, parse_precision
from harness.types import Scope


def test_one_meaning_has_one_spelling():
    """Granularities are spelt out, `keep` only where it is not the usual one."""
    told = parse_precision({"weights": "float8_e4m3fn", "activations": "int8", "state": "float16", "cache": "mxfp4"})
    assert told.words() == {
        "weights": "float8_e4m3fn:channel", "activations": "int8:token", "cache": "mxfp4", "state": "float16",
    }  # fmt: skip
    assert parse_precision(told.words()) == told
    assert told.keep == KEEP
    kept = parse_precision({"weights": "int4:128", "keep": ["*.o_proj", "lm_head"]})
    assert kept.words()["keep"] == "*.o_proj,lm_head"
    assert kept.keeps("model.layers.0.self_attn.o_proj")
    assert not kept.keeps("model.layers.0.mlp.gate.weight")
    assert parse_precision({"keep": "x"}).words() == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"weight": "int8"}, "did you mean 'weights'"),
        ({"cache": "float8_e4m3"}, "did you mean 'float8_e4m3fn'"),
        ({"cache": "int8:channel"}, "tensor, head, token, N (as 128), cast"),
        ({"weights": "float8_e4m3fn:128x"}, "RxC (as 128x128)"),
        ({"weights": "int8:0"}, "unknown granularity '0'"),
        ({"weights": "mxfp4:16"}, "shares a scale among 32"),
        ({"state": "float16:token"}, "has no scale"),
        ({"activations": 8}, "expected activations like"),
    ],
)
def test_a_word_that_is_not_known_is_refused(words, said):
    """The nearest valid word is named, or all of them."""
    with pytest.raises(SpecError) as caught:
        parse_precision(words)
    assert said in str(caught.value)


def test_the_file_and_the_command_line_say_it(tmp_path, monkeypatch):
    """[accel.precision] and --set accel.precision.KEY; a mistake names its line; the digest of the run changes."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "day0.toml"
    file.write_text(
        '[accel]\ndtype = "bfloat16"\n[accel.precision]\ncache = "float8_e4m3fn"\nkeep = ["lm_head", "a*"]\n'
    )
    told = load_config(file)
    assert told.accel.precision == {"cache": "float8_e4m3fn:tensor", "keep": "lm_head,a*"}
    more = load_config(file, sets=["accel.precision.weights=int8:128"])
    assert more.accel.precision["weights"] == "int8:128"
    assert more.accel.precision["cache"] == "float8_e4m3fn:tensor"
    assert len({told.digest, more.digest, load_config(sets=["accel.precision.cache=int8"]).digest}) == 3
    file.write_text('[accel.precision]\ncache = "fp8_e4m3"\n')
    with pytest.raises(ConfigError, match=r"day0.toml:\d.*float8_e4m3fn"):
        load_config(file)


def test_the_users_word_stands_over_the_ports(tmp_path):
    """A port's own scope may declare; the user's word goes over it; float32 runs are then off, with the reason."""
    own = Scope(precision={"cache": "int8", "weights": "int8"}, precisions=("float32",))
    scope = declared(own, {"cache": "float8_e4m3fn:head"})
    assert scope.precision == {"weights": "int8:channel", "cache": "float8_e4m3fn:head"}
    assert scope.precisions == ()
    assert "cache float8_e4m3fn:head" in scope.off["float32"]
    assert declared(Scope(precisions=("float32",)), {}).precisions == ("float32",)
    assert declared(Scope(precisions=("float32",)), {"state": "bfloat16"}).precisions == ("float32",)
