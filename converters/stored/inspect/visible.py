"""Text of a dataset -> text that shows itself: what would steer a terminal or reorder lines is written as escapes."""

from __future__ import annotations

import re

# Control characters but tab and newline; marks that turn the direction of text, or hide (joiners, which emoji and some
# scripts need, stay); line separators; halves of surrogate pairs, which cannot be encoded.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    """The text with control characters escaped.

    >>> visible("a\\tb\\x1b[31m\\u202e")
    'a\\tb\\\\x1b[31m\\\\u202e'
    """
    return _UNSEEN.sub(lambda match: _escape(ord(match[0])), text)


def clip(text: str, limit: int) -> str:
    """The text, or its beginning and how much is left out."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit:,} more characters)"


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
