"""The user's words become one frozen record, or a message that says what to type instead."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from harness.config import Config, load_config, parse_layout
from harness.errors import ConfigError, UsageError
from harness.scaffold import CONFIG
from harness.types import STAGES, Layout, Scope


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Run in a folder without a day0.toml."""
    monkeypatch.chdir(tmp_path)


def written(tmp_path, text: str):
    path = tmp_path / "day0.toml"
    path.write_text(text)
    return path


def test_defaults_are_the_built_in_pair():
    """Without any word the built-in pair is verified in bfloat16, all stages, quickly."""
    config = load_config()
    assert (config.reference.spec, config.accel.spec, config.accel.dtype) == (
        "builtin:reference",
        "builtin:accel",
        "bfloat16",
    )
    assert (config.run.stage, config.run.profile, config.file) == (STAGES, "quick", None)


def test_precedence(tmp_path):
    """--set goes over flags, flags over the file, the file over defaults; an unset flag changes nothing."""
    file = written(tmp_path, '[run]\nprofile = "full"\nkeep_going = true\nout = "a"\n')
    flags = {"run.out": "b", "run.profile": None, "run.resume": True}
    config = load_config(file, flags=flags, sets=["run.resume=false"])
    assert (config.run.profile, config.run.keep_going, str(config.run.out), config.run.resume) == (
        "full",
        True,
        "b",
        False,
    )


def test_the_file_of_the_current_folder_is_read(tmp_path):
    """A day0.toml in the current folder counts without being named."""
    written(tmp_path, '[run]\nprofile = "full"\n')
    assert load_config().run.profile == "full"


def test_paths_in_a_file_are_relative_to_it(tmp_path):
    """Relative paths and SPECs of a file start at the file's folder; modules, addresses and absolute paths stay."""
    folder = tmp_path / "sub"
    folder.mkdir()
    file = written(
        folder, '[run]\nout = "runs"\n[reference]\nspec = "hf:model?attn=eager"\n[accel]\nspec = "port.py:make"\n'
    )
    config = load_config(file)
    assert config.run.out == folder / "runs"
    assert config.reference.spec == f"hf:{folder}/model?attn=eager"
    assert config.accel.spec == f"{folder}/port.py:make"
    file.write_text('[reference]\nspec = "hf:/models/x"\n[accel]\nspec = "package.module:make"\n')
    config = load_config(file)
    assert (config.reference.spec, config.accel.spec) == ("hf:/models/x", "package.module:make")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[run]\n\nprofil = "quick"\n', r"day0\.toml:3: unknown key 'profil' in \[run\] \(did you mean 'profile'\?\)"),
        ('[rnu]\nprofile = "quick"\n', r"day0\.toml:1: unknown section 'rnu' \(did you mean 'run'\?\)"),
        ('profile = "quick"\n', r"day0\.toml:1: unknown section 'profile' \(did you mean 'run\.profile'\?\)"),
        (
            '[accel]\n[accel.option]\nattn = "x"\n',
            r"day0\.toml:2: unknown key 'option' in \[accel\] \(did you mean 'options'\?\)",
        ),
        ('run = "quick"\n', r"day0\.toml:1: expected a table \[run\], found 'quick'"),
        ('[run]\nprofile = "fast"\n', r"day0\.toml:2: \[run\] profile: .*'quick' or 'full', found 'fast'"),
        ("[watchdog]\nrun_s = -1\n", r"day0\.toml:2: \[watchdog\] run_s: .*greater than 0"),
        ('[scope]\nlayouts = ["tp0"]\n', r"day0\.toml:2: \[scope\] layouts: expected a layout like"),
        ('[accel]\nspec = "p.py:f?dtype=float32"\ndtype = "bfloat16"\n', r"keep one of them"),
        ("[run\n", r"day0\.toml is not valid TOML"),
    ],
)
def test_a_wrong_file_says_where_and_what(tmp_path, text, message):
    """Each mistake in a file is named with its line and, where there is one, the nearest valid word."""
    with pytest.raises(ConfigError, match=message):
        load_config(written(tmp_path, text))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("profile=full", r"expected --set section\.key=value"),
        ("run.profile", r"expected --set section\.key=value"),
        ("run.profil=full", r"--set run\.profil=full: unknown key 'profil'"),
        ("run.stage=txt", r"unknown stage 'txt' \(did you mean 'text'\?\)"),
        ("run.require=imgae", r"cannot require 'imgae' \(did you mean 'image'\?\)"),
        ("run.stage=[]", r"expected at least one stage"),
    ],
)
def test_a_wrong_set_says_what(item, message):
    """Each mistake in --set is named with the words that were typed."""
    with pytest.raises(ConfigError, match=message):
        load_config(sets=[item])


def test_a_missing_file_is_named():
    """A configuration file that is not there is a mistake, not a default."""
    with pytest.raises(ConfigError, match=r"no configuration file at nowhere\.toml"):
        load_config(Path("nowhere.toml"))


def test_sets_take_toml_and_bare_words():
    """Values of --set are TOML where they parse, bare words elsewhere; options are always text."""
    sets = [
        "scope.max_length_tokens=512",
        "scope.layouts=tp2,pp2",
        'scope.off.chat="no tokenizer"',
        "accel.options.layers=4",
    ]
    config = load_config(sets=sets)
    assert config.scope.max_length_tokens == 512
    assert config.scope.layouts == (Layout(tp=2), Layout(pp=2))
    assert config.scope.off == {"chat": "no tokenizer"}
    assert config.accel.options == {"layers": "4"}


def test_stage_words():
    """Stages come in running order whatever the order typed, hyphens are allowed, `all` is all."""
    assert load_config(flags={"run.stage": "multi-card,load"}).run.stage == ("load", "multi_card")
    assert load_config(flags={"run.stage": "text,all"}).run.stage == STAGES


def test_precision_comes_from_the_spec_where_it_is_written_there():
    """`?dtype=` in a SPEC sets the side's precision; in a command or an address a question mark is theirs."""
    assert load_config(flags={"accel.spec": "port.py:make?dtype=float32"}).accel.dtype == "float32"
    assert load_config(flags={"accel.spec": "serve:run?dtype=float32"}).accel.dtype == "bfloat16"


def test_a_foreign_reference_needs_a_port():
    """A reference of one's own is not judged against the built-in port by default; recording it needs no port."""
    with pytest.raises(UsageError, match="no port was named"):
        load_config(flags={"reference.spec": "hf:/models/x"})
    assert load_config(flags={"reference.spec": "hf:/models/x"}, sides=("reference",)).reference.spec == "hf:/models/x"


def test_digest_follows_what_is_measured():
    """The digest changes with sides, scope and profile, and not with where or how long a run goes."""
    base = Config().digest
    for item in (
        "accel.options.a=1",
        "accel.dtype=float32",
        "scope.image=false",
        "run.profile=full",
        "reference.dtype=float64",
    ):
        assert load_config(sets=[item]).digest != base, item
    for item in ("run.out=x", "run.resume=true", "run.stage=load", "watchdog.run_s=5", "run.keep_going=true"):
        assert load_config(sets=[item]).digest == base, item


def test_a_value_of_another_type_is_named(tmp_path):
    """A SPEC that is no text is a mistake with its line, not an error inside."""
    with pytest.raises(ConfigError, match=r"day0\.toml:2: \[reference\] spec: .*string, found 5"):
        load_config(written(tmp_path, "[reference]\nspec = 5\n"))


@pytest.mark.parametrize("item", ["run.out=file", "run.goldens=file", "run.checklists=empty", "run.checklists=none",
                                  "run.after=none", "run.after=empty", "accel.python=/no/python"])  # fmt: skip
def test_a_path_that_cannot_be_is_refused(tmp_path, item):
    """A path that is not what its key needs is named before anything starts, with what was typed."""
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"--set {item}: expected "):
        load_config(sets=[item])


def test_words_to_type_again():
    """The flags that a reproduction needs are kept as typed; where and how a run goes on is left out."""
    flags = {"accel.spec": "port.py:f", "run.out": "x", "run.stage": "text", "run.profile": "full", "run.resume": True}
    config = load_config(flags=flags, sets=["scope.image=false"])
    assert config.words == ("--accel", "port.py:f", "--profile", "full", "--set", "scope.image=false")


def test_scope_narrows_the_claim():
    """[scope] goes over the port's own claim; what it leaves out stays, reasons are joined."""
    claim = Scope(image=True, serves=True, off={"chat": "none"})
    scope = load_config(sets=["scope.image=false", 'scope.off.cache="later"', "scope.phases=[]"]).scope.apply(claim)
    assert (scope.image, scope.serves, scope.phases) == (False, True, ())
    assert scope.off == {"chat": "none", "cache": "later"}
    assert Config().scope.apply(claim) == claim


def test_layouts_read_and_print_alike():
    """A layout's printed form parses back."""
    for layout in (Layout(), Layout(tp=2), Layout(tp=2, pp=3), Layout(ep=4, sp=2)):
        assert parse_layout(str(layout)) == layout


def test_every_commented_key_of_the_scaffold_is_valid(tmp_path):
    """The scaffold's defaults are the defaults: uncommented, the file reads, and its defaults change nothing."""
    text = re.sub(r"^# (\w+ = )", r"\1", CONFIG, flags=re.M)
    assert text != CONFIG
    (tmp_path / "checklists").mkdir()
    (tmp_path / "checklists" / "text.toml").write_text("")
    text = text.replace("/opt/vendor/bin/python", sys.executable)
    config = load_config(written(tmp_path, text))
    assert config.watchdog == Config().watchdog
    assert (config.run.stage, config.run.profile, config.run.keep_going) == (STAGES, "quick", False)
    assert (config.accel.dtype, config.scope.layouts) == ("bfloat16", (Layout(), Layout(tp=2)))


def test_a_precision_that_the_user_claims_is_in_scope():
    """`precisions` adds to the port's claim and takes away the port's own reason for not claiming it."""
    port = Scope(off={"float32": "not claimed", "image": "no tower"})
    scope = load_config(sets=['scope.precisions=["float32"]']).scope.apply(port)
    assert scope.precisions == ("float32",)
    assert dict(scope.off) == {"image": "no tower"}


def test_a_precision_that_the_user_switches_off_is_not_run():
    """`off` with a reason takes a claim of the port back; another precision's claim stays."""
    port = Scope(precisions=("float32", "float64"))
    scope = load_config(sets=['scope.off.float32="too large"']).scope.apply(port)
    assert (scope.precisions, scope.off["float32"]) == (("float64",), "too large")


def test_a_port_has_one_digest_however_its_path_is_spelt(tmp_path):
    """A relative and an absolute path to the same port give equal digests; another port gives another."""
    near = load_config(sets=["accel.spec=port.py:make"])
    far = load_config(sets=[f"accel.spec={Path.cwd()}/port.py:make"])
    assert near.digest == far.digest
    assert near.digest != load_config(sets=["accel.spec=other.py:make"]).digest


def test_operators_are_switched_to_the_reference_by_name():
    """`accel.fallback` reaches the port as its option of that name, and no other side."""
    from harness.plan import make_setups

    setups = make_setups(load_config(sets=["accel.fallback=attn.sparse_decode,moe.experts"]))
    assert setups["accel"].options["fallback"] == "attn.sparse_decode,moe.experts"
    assert "fallback" not in setups["oracle"].options
    assert "fallback" not in make_setups(load_config())["accel"].options
