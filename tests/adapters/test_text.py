"""The text front end that a checkpoint's files describe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.adapters.text import TextFrontEnd, end_ids
from harness.errors import CheckpointError, PortError

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[UNK]": 0, "<s>": 1, "hello": 2, "world": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "chat_template": TEMPLATE})
    )
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [3, 2]}}))
    return tmp_path


def test_words(folder: Path) -> None:
    """Text goes to ids and back; a conversation is rendered with the special tokens of the configuration."""
    front = TextFrontEnd(folder)
    assert front.encode("hello world") == [2, 3]
    assert front.decode([2, 3]) == "hello world"
    assert front.render([{"role": "user", "content": "hi"}]) == "<s><user>hi<a>"


def test_ends(folder: Path) -> None:
    """Generation ends where generation_config.json says; config.json is asked where it is silent."""
    assert end_ids(folder) == {2, 3}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert end_ids(folder) == {1}


def test_templates_are_hostile(folder: Path) -> None:
    """A template cannot reach Python's insides, and what it raises is the port's own words."""
    path = folder / "chat_template.jinja"
    path.write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(PortError, match="refused"):
        TextFrontEnd(folder).render([])
    path.write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(PortError, match="roles must alternate"):
        TextFrontEnd(folder).render([])


def test_missing_files(tmp_path: Path) -> None:
    """A folder without a tokenizer or a template says which file was expected."""
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        TextFrontEnd(tmp_path).encode("x")
    with pytest.raises(CheckpointError, match="chat template"):
        TextFrontEnd(tmp_path).render([])
