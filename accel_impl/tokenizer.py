"""The text front end: tokenizer, chat template, incremental text. Knows the checkpoint's files, not the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import CheckpointError, PortError

REPLACEMENT = "\ufffd"
"""What an incomplete or invalid byte sequence decodes to."""


class TextFront:
    """Text to ids and back. `encode` adds the special tokens of a plain prompt; a rendered conversation has its own."""

    def __init__(self, checkpoint: Path) -> None:
        from tokenizers import Tokenizer

        path = checkpoint / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"expected a tokenizer at {path}, found none; use token ids")
        self._tokenizer = Tokenizer.from_file(str(path))
        self._config: dict[str, Any] = json.loads((checkpoint / "tokenizer_config.json").read_text())
        self._template_path = checkpoint / "chat_template.jinja"

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokenise; `special` False for text that already has its special tokens, as a rendered conversation."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text, special tokens skipped."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def token(self, token_id: int) -> str:
        """Return one token's own text, special or not."""
        name: str | None = self._tokenizer.id_to_token(token_id)
        return self.decode([token_id]) or name or ""

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render a conversation with the generation prompt, in jinja's sandbox."""
        from jinja2 import StrictUndefined, TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
        environment.globals["raise_exception"] = _refuse
        try:
            template = environment.from_string(self._template_path.read_text())
            return template.render(
                messages=[dict(m) for m in messages],
                add_generation_prompt=True,
                bos_token=self._config.get("bos_token", ""),
                eos_token=self._config.get("eos_token", ""),
            )
        except (OSError, TemplateError) as error:
            raise PortError(f"expected messages that {self._template_path.name} can render, found: {error}") from error


def _refuse(message: str) -> None:
    raise PortError(message)


class TextStream:
    """Text of a growing list of ids, given out in pieces that never end inside a character."""

    def __init__(self, front: TextFront) -> None:
        self._front, self._ids, self._sent = front, list[int](), 0

    def push(self, token_id: int) -> str:
        """Add an id and return the text that is complete now, without what was given before."""
        self._ids.append(token_id)
        text = self._front.decode(self._ids)
        whole = text.rstrip(REPLACEMENT) if text.endswith(REPLACEMENT) else text
        piece = whole[self._sent :]
        self._sent = max(self._sent, len(whole))
        return piece

    def end(self) -> str:
        """Return what is left, incomplete characters included."""
        return self._front.decode(self._ids)[self._sent :]


class StopText:
    """Text until one of some strings is met. What may be the beginning of one is held back until it is known."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.met = tuple(stops), "", False

    def push(self, piece: str) -> str:
        """Add text and return what is certain; nothing from the first stop on."""
        if self.met:
            return ""
        self._held += piece
        places = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if places:
            self.met = True
            return self._held[: min(places)]
        keep = max((n for stop in self._stops for n in range(len(stop)) if self._held.endswith(stop[:n])), default=0)
        cut = len(self._held) - keep
        given, self._held = self._held[:cut], self._held[cut:]
        return given

    def end(self) -> str:
        """Return what was held back, when nothing more comes."""
        given, self._held = "" if self.met else self._held, ""
        return given
