"""The text files beside the weights. Knows the special tokens and their JSON; must not know tensors."""

from __future__ import annotations

from typing import Any

SPECIAL_TOKENS = ("<bos>", "<eos>", "<image>", "<user>", "<assistant>", "<end>", "<pad>")
FIRST_SPECIAL_ID = 256

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.role not in ('user', 'assistant') -%}
        {{- raise_exception('expected the role user or assistant, found ' ~ message.role) -}}
    {%- endif -%}
    {{- '<' ~ message.role ~ '>' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {{- '<image>' if part.type == 'image' else part.text -}}
        {%- endfor -%}
    {%- endif -%}
    {{- '<end>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<assistant>' -}}
{%- endif -%}
"""


def byte_alphabet() -> list[str]:
    """Return the printable character that stands for each byte in byte-level vocabularies.

    Source: openai/gpt-2 src/encoder.py bytes_to_unicode: printable bytes stand for themselves, the others for the
    code points from 256 on, in order.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]


def tokenizer_json() -> dict[str, Any]:
    """Return `tokenizer.json`: one token per byte, no merges, `<bos>` put in front of a prompt."""
    special = [
        {"id": FIRST_SPECIAL_ID + i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for i, token in enumerate(SPECIAL_TOKENS)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    bos = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [FIRST_SPECIAL_ID], "tokens": ["<bos>"]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {char: byte for byte, char in enumerate(byte_alphabet())},
            "merges": [],
        },
    }


def tokenizer_config() -> dict[str, Any]:
    """Return `tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1048576,
    }
