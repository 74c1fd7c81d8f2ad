"""Pairs of whole texts, which begin alike with what they answer (HH-RLHF's) -> what is stored of them. Pure.

Such texts say by themselves who speaks, so that no chat template touches them. What is the prompt follows TRL 1.16
(`extract_prompt`).
"""

from __future__ import annotations

from ...errors import DataError
from ...types import Sample
from .chat import json_of
from .content import MEDIA_ROLES
from .fields import Fields
from .row_kind import ReadOptions


def stored_texts(chosen: str, rejected: str, fields: Fields, options: ReadOptions) -> Sample:
    """The sample of two texts; DataError where they have no beginning in common, or there is more to the row."""
    has = [role for role in ("system", "tools", "input", "history") if fields.get(role)]
    has += [role for role in MEDIA_ROLES.values() if fields.references(role)]
    if has or options.system:
        raise DataError(
            f"chosen and rejected are whole texts, which have no room for {', '.join(has) or 'a system prompt'}: name "
            "the prompt's column with --columns prompt=COLUMN, so that they are answers to it in a chat"
        )
    if chosen == rejected:
        raise DataError("chosen and rejected are the same, so neither is better: remove the row")
    shared = num_shared(chosen, rejected)
    if not shared:
        raise DataError(
            "the row has answers and no prompt: name its column with --columns prompt=COLUMN; the texts begin "
            "differently, so it is not in them"
        )
    text = json_of({"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]})
    return {"messages": text, "media": b""}


def num_shared(chosen: str, rejected: str) -> int:
    """How many characters of two texts are the prompt: those that they begin with alike, but for a space at the end.

    Tokenizers join a space with the word behind it.

    >>> num_shared("It is blue", "It is green")
    5
    """
    num = min(len(chosen), len(rejected))
    shared = next((n for n in range(num) if chosen[n] != rejected[n]), num - 1)
    return shared - 1 if shared > 0 and chosen[shared - 1] == " " else max(shared, 0)
