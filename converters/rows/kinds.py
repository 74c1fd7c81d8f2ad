"""The kinds of rows that are known, in the order in which they are looked for: the first that fits a row is taken.

A new kind is a file that makes a RowKind, and a line here.
"""

from __future__ import annotations

from .alpaca import ALPACA
from .columns import COLUMNS
from .dialog import DIALOG
from .exchanges import EXCHANGES
from .image import IMAGE
from .image_label import IMAGE_LABEL
from .messages import MESSAGES, SHAREGPT
from .preference_kinds import KTO, PREFERENCE
from .prompts import CAPTION, PROMPT_RESPONSE, QUESTION_ANSWER
from .row_kind import RowKind
from .text import TEXT
from .tokens import TOKENS

_IN_ORDER: tuple[RowKind, ...] = (
    TOKENS,
    PREFERENCE,
    KTO,
    MESSAGES,
    SHAREGPT,
    EXCHANGES,
    ALPACA,
    PROMPT_RESPONSE,
    QUESTION_ANSWER,
    CAPTION,
    TEXT,
    IMAGE_LABEL,
    DIALOG,
    IMAGE,
    COLUMNS,
)
KINDS: dict[str, RowKind] = {kind.name: kind for kind in _IN_ORDER}
COLUMN_ROLES = tuple(dict.fromkeys(role for kind in _IN_ORDER for role in kind.columns))  # that --columns names
