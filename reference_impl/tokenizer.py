"""The text front end. Knows the tokenizer's and the template's files; must not know the model.

`tokenizers` and `jinja2` are imported when a front end is made, not before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from harness.errors import CheckpointError, PortError


class TextFrontEnd:
    """Text to token ids and back, and conversations to text."""

    def __init__(self, checkpoint: Path) -> None:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
            self._config = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8"))
            template = (checkpoint / "chat_template.jinja").read_text(encoding="utf-8")
        except Exception as error:  # the tokenizers library raises bare Exception
            raise CheckpointError(
                f"expected a tokenizer and a chat template in {checkpoint}, found: {error}"
            ) from error
        self._template = ImmutableSandboxedEnvironment().from_string(template)

    def encode(self, text: str) -> list[int]:
        """Tokenise a prompt, `<bos>` in front."""
        return list(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def encode_rendered(self, text: str) -> list[int]:
        """Tokenise what the chat template gave; it brings its own `<bos>`."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn token ids into text, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render a conversation with the generation prompt. Raises PortError for a role that the template refuses."""

        def raise_exception(message: str) -> NoReturn:
            raise PortError(message)

        return self._template.render(
            messages=[dict(m) for m in messages],
            bos_token=self._config["bos_token"],
            eos_token=self._config["eos_token"],
            add_generation_prompt=True,
            raise_exception=raise_exception,
        )
