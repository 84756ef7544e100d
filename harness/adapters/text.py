"""The text front end that a checkpoint describes: tokenizer.json, chat template, end ids. Knows no models.

`tokenizers` and `jinja2` are imported when they are first needed. Chat templates are hostile input and render in
jinja's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.adapter import TokenIds
from harness.errors import CheckpointError, PortError


class TextFrontEnd:
    """Tokenise, decode and render as the files of a checkpoint folder say."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        path = self.checkpoint / "tokenizer.json"
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a file it cannot read
            raise CheckpointError(f"expected a tokenizer at {path}, found: {error}") from error

    @cached_property
    def _config(self) -> Mapping[str, Any]:
        return read_json(self.checkpoint / "tokenizer_config.json")

    def encode(self, text: str, *, special: bool = True) -> TokenIds:
        """Tokenise text; `special` adds what the tokenizer puts around a prompt."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn token ids into text, special tokens skipped."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render a conversation with the chat template and the generation prompt."""
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _raise
        words = {k: _content(v) for k, v in self._config.items() if k.endswith("_token")}
        try:
            template = environment.from_string(self._template())
            return template.render(messages=[dict(m) for m in messages], add_generation_prompt=True, **words)
        except TemplateError as error:
            raise PortError(f"the chat template of {self.checkpoint} refused the conversation: {error}") from error

    def _template(self) -> str:
        path = self.checkpoint / "chat_template.jinja"
        if path.is_file():
            return path.read_text()
        found = self._config.get("chat_template")
        if isinstance(found, list):
            found = next((t["template"] for t in found if t.get("name") == "default"), None)
        if not isinstance(found, str):
            raise CheckpointError(
                f"expected a chat template in {path} or tokenizer_config.json, found none; use token ids or a prompt"
            )
        return found


def end_ids(checkpoint: Path) -> frozenset[int]:
    """Return the ids that end a generation, as `generation_config.json` says, or else `config.json`."""
    config = read_json(checkpoint / "config.json")
    text = config.get("text_config")
    for source in (read_json(checkpoint / "generation_config.json"), config, text if isinstance(text, dict) else {}):
        found = source.get("eos_token_id")
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the JSON object of a file, or an empty one where there is no such file."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _raise(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)
