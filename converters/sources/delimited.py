"""What the user says of CSV and TSV -> how they are written, checked."""

from __future__ import annotations

import codecs
from typing import Any

from ...errors import ConfigError, did_you_mean
from .table import Delimited

KEYS = ("delimiter", "quote", "encoding")
_QUOTES = {"none": "", "double": '"'}
_DELIMITERS = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|", "space": " "}


def delimited(*, delimiter: str | None = None, quote: str | None = None, encoding: str | None = None) -> Delimited:
    """delimiter: a character, or tab. quote: none, double, or a character. encoding: one that Python knows.

    ConfigError for what is none.

    >>> delimited(delimiter="tab", quote="none").delimiter
    '\\t'
    """
    made = Delimited(
        delimiter=None if delimiter is None else _DELIMITERS.get(delimiter, delimiter),
        quote=None if quote is None else _QUOTES.get(quote, quote),
        encoding=encoding,
    )
    if made.delimiter is not None and (len(made.delimiter) != 1 or made.delimiter in '\r\n"\0'):
        raise ConfigError(f"delimiter {delimiter!r} cannot stand between fields: pass one character, or tab")
    if quote == "" or (made.quote and not (len(made.quote) == 1 and made.quote.isprintable())):
        raise ConfigError(f"quote {quote!r} is no quote: pass none, double, or the one character that it is")
    if encoding is not None:
        _check_encoding(encoding)
    return made


def _check_encoding(encoding: str) -> None:
    try:
        is_text = getattr(codecs.lookup(encoding), "_is_text_encoding", True)
    except LookupError:
        is_text = False
    if not is_text:
        nearest = did_you_mean(encoding, ("utf-8", "utf-16", "utf-32", "latin-1", "cp1252", "gb18030", "shift_jis"))
        raise ConfigError(f"encoding {encoding!r} is none that Python knows: {nearest}")


def delimited_of_entry(given: Any) -> Delimited:
    """Of what an entry of a list says: {delimiter, quote, encoding}, each a text. ConfigError for what is none."""
    if not isinstance(given, dict):
        raise ConfigError(f"csv is {given!r}: write csv: {{delimiter: …, quote: …, encoding: …}}")
    for key, value in given.items():
        if key not in KEYS:
            raise ConfigError(f"csv has no {key!r}: {did_you_mean(key, KEYS)}")
        if not isinstance(value, str):
            raise ConfigError(f"csv.{key} is {value!r}: expected text")
    return delimited(**given)
