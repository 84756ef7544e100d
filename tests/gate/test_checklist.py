"""Checklists: the shipped ones are complete, and mistakes in one's own are named."""

from pathlib import Path

import pytest

from harness.checklist import load_checklists
from harness.errors import ChecklistError
from harness.metrics.names import METRICS
from harness.types import STAGES

GOOD = """
stage = "text"
questions = ["Does it answer?"]
[[criteria]]
id = "mine.layers"
metric = "error_ratio"
op = "<="
limit = 1
unit = "ratio"
why = "because"
source = "measured"
needs = ["phases"]
select = { slice = "whole" }
"""


def folder(tmp_path: Path, text: str, name: str = "text.toml") -> Path:
    (tmp_path / name).write_text(text)
    return tmp_path


def test_a_checklist_of_ones_own_replaces_its_stage_only(tmp_path: Path) -> None:
    """The own text criteria stand, the shipped ones of the other stages remain, and the digest changes."""
    own, shipped = load_checklists(folder(tmp_path, GOOD)), load_checklists()
    assert [c.id for c in own.by_stage["text"]] == ["mine.layers"]
    assert own.by_stage["text"][0].needs == ("phases",)
    assert own.questions["text"] == ("Does it answer?",)
    assert own.by_stage["image"] == shipped.by_stage["image"]
    assert own.digest != shipped.digest


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("limit = 1", "limt = 1", ["mine.layers", "limt", "did you mean 'limit'"]),
        ("error_ratio", "eror_ratio", ["mine.layers", "eror_ratio", "did you mean 'error_ratio'"]),
        ('unit = "ratio"', 'unit = "percent"', ["mine.layers", "percent", "'ratio'"]),
        ('op = "<="', 'op = "<"', ["mine.layers", "'<'"]),
        ("limit = 1", 'limit = "1"', ["mine.layers", "limit"]),
        ("limit = 1", "limit = nan", ["mine.layers", "NaN"]),
        ('["phases"]', '["phase"]', ["mine.layers", "did you mean 'phases'"]),
        ('why = "because"', "", ["mine.layers", "why"]),
        ('stage = "text"', 'stage = "txt"', ["text.toml", "txt"]),
        ('stage = "text"', "stage = text", ["text.toml", "TOML"]),
        ('questions = ["Does it answer?"]', 'question = "x"', ["did you mean 'questions'"]),
        ('id = "mine.layers"', 'id = "image.tower"', ["image.tower", "twice"]),
    ],
)
def test_a_mistake_names_file_criterion_and_the_nearest_word(
    tmp_path: Path, old: str, new: str, words: list[str]
) -> None:
    """One clear message before anything runs."""
    with pytest.raises(ChecklistError) as caught:
        load_checklists(folder(tmp_path, GOOD.replace(old, new)))
    assert "text.toml" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_is_no_stage_is_refused(tmp_path: Path) -> None:
    """A misspelt file name would silently judge nothing."""
    folder(tmp_path, GOOD)
    with pytest.raises(ChecklistError, match=r"texts\.toml.*did you mean 'text'"):
        load_checklists(folder(tmp_path, GOOD, "texts.toml"))
    with pytest.raises(ChecklistError, match="found none"):
        load_checklists(tmp_path / "nowhere")


def test_waivers_need_an_owner_a_link_an_end_and_a_criterion(tmp_path: Path) -> None:
    """A complete waiver is read; one without an owner, or of an unknown criterion, is refused."""
    folder(tmp_path, GOOD)
    good = '[[waivers]]\ncriterion = "mine.layers"\nowner = "ann"\nlink = "https://e.org"\nexpires = 2030-01-01\n'
    assert load_checklists(folder(tmp_path, good, "waivers.toml")).waivers[0].expires == "2030-01-01"
    quoted = load_checklists(folder(tmp_path, good.replace("2030-01-01", '"2030-01-01"'), "waivers.toml"))
    assert quoted.waivers[0].expires == "2030-01-01"
    for old, new, word in (('owner = "ann"\n', "", "owner"), ("mine.layers", "mine.layer", "mine.layers")):
        with pytest.raises(ChecklistError, match=word):
            load_checklists(folder(tmp_path, good.replace(old, new), "waivers.toml"))


def test_every_shipped_stage_has_four_blocking_criteria_and_a_core() -> None:
    """Each stage promises at least four blocking things, some of which cannot be scoped out; ids say their stage."""
    lists = load_checklists()
    for stage in STAGES:
        criteria = lists.by_stage[stage]
        assert sum(c.blocking for c in criteria) >= 4, stage
        assert any(c.core and c.blocking for c in criteria), stage
        assert all(c.id.startswith(stage + ".") for c in criteria), stage
        assert lists.questions[stage], stage


def test_every_practice_names_criteria_that_exist() -> None:
    """The seven practices are there, and what ticks them is a criterion or a named fact."""
    lists = load_checklists()
    assert len(lists.practices) == 7
    for practice in lists.practices:
        assert practice.criteria or practice.facts
        assert all(lists.criterion(c) is not None for c in practice.criteria), practice.id


def test_every_unit_is_a_known_word() -> None:
    """Units come from a short list, so that a typing error cannot make two units of one."""
    known = {"count", "ratio", "share", "z", "s", "tokens", "tokens/s", "nats/token"}
    assert set(METRICS.values()) <= known
