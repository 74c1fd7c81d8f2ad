"""Which tokens have bytes of which characters, said without offsets: by the bytes of each token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

ENDS = ["<|end|>", "<|user|>", "<|assistant|>"]
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Unit(NamedTuple):
    """A character of a text, or several that a tokenizer makes one: [start, stop), and the bytes that these become."""

    start: int
    stop: int
    data: bytes


def _alphabet() -> dict[str, int]:
    """The character by which byte-level tokenizers write each byte, after GPT-2: printable ones are themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
    assert set(alphabet) == set(ByteLevel.alphabet())
    return alphabet


_BYTES = _alphabet()


def bytes_of(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes of a text that a token stands for."""
    token = str(tokenizer.id_to_token(token_id))
    added = tokenizer.get_added_tokens_decoder()
    if token_id in added:
        return str(added[token_id].content).encode()
    if isinstance(tokenizer.pre_tokenizer, ByteLevel):
        return bytes(_BYTES[char] for char in token)
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def with_bytes(pieces: Sequence[bytes], units: Sequence[Unit], first: int, last: int) -> list[int]:
    """Numbers of the tokens that have bytes of the units from first to last, or share a unit with such a token."""
    stops = [*accumulate(map(len, pieces))]
    begins = [0, *stops[:-1]]
    ends = [*accumulate(len(unit.data) for unit in units)]
    of_units = []
    for unit, end in zip(units, ends, strict=True):
        begin = end - len(unit.data)
        of_units.append({at for at, (a, b) in enumerate(zip(begins, stops, strict=True)) if a < end and b > begin})
    found: set[int] = set().union(*of_units[first : last + 1])
    while True:
        wider = found.union(*(tokens for tokens in of_units if tokens & found))
        if wider == found:
            return sorted(found)
        found = wider
