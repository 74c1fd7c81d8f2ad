"""Tokens of sequences as a person sees them: documents, or the prompt of answers once and then each answer. Pure."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np

from ....processors.base import IGNORED_LABEL
from ....types import Processed, Role

_NAMES = {
    2: {Role.CHOSEN: "chosen", Role.REJECTED: "rejected"},
    1: {Role.CHOSEN: "answer (good)", Role.REJECTED: "answer (bad)"},
}  # of a role, by the number of answers


def token_parts(processed: Processed) -> list[tuple[str, int, int]]:
    """What is shown of a sample's tokens: a heading, and the tokens [first, stop) below it.

    Of answers, the prompt of the first and then each answer from its first learnt token; of documents each; of samples
    that are one sequence all, with no heading.
    """
    labels = np.asarray(processed["labels"])
    if "sequences" not in processed:
        return [("", 0, len(labels))]
    sequences = np.asarray(processed["sequences"]).tolist()
    parts, first = [], 0
    if sequences[0][1] == Role.DOCUMENT:
        starts = list(accumulate((length for length, _ in sequences), initial=0))
        return [
            (f"document of {stop - start:,} tokens in this sample", start, stop) for start, stop in pairwise(starts)
        ]
    for number, (length, role) in enumerate(sequences):
        learnt = np.flatnonzero(labels[first : first + length] != IGNORED_LABEL)
        answer = first + (int(learnt[0]) if len(learnt) else 0)
        if number == 0:
            parts.append(("prompt", first, answer))
        name = _NAMES[min(len(sequences), 2)][Role(role)]
        parts.append((f"{name}, a sequence of {length:,} tokens", answer, first + length))
        first += length
    return parts
