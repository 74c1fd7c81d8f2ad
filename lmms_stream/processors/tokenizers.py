"""Tokenizers from a folder or the hub, and what names them in a fingerprint."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """The tokenizer at a local path or hub id; ConfigError when there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        first_line = str(error).splitlines()[0]
        raise ConfigError(f"tokenizer {path!r} cannot be loaded: {first_line}") from error
    return tokenizer


def check_fast(tokenizer: PreTrainedTokenizerFast, name: str, *, why: str) -> None:
    if not tokenizer.is_fast:
        raise ConfigError(f"tokenizer {name} is not a fast one: {why} tokenizer.json")


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
