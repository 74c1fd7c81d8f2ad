"""Options that take several values: each value becomes an option of its own, and what follows them is left alone.

argparse lets such an option take all words up to the next option, sources and target too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

_NUMBER = re.compile(r"-\.?\d")


def is_pair(word: str) -> bool:
    """Whether a word reads NAME=VALUE, and is no path or URL."""
    name, separator, _ = word.partition("=")
    return bool(name and separator) and not re.search(r"[/:?*\\]", name)


def one_value_each(
    words: Sequence[str],
    *,
    flags: Collection[str],
    pairs: Collection[str],
    lists: Mapping[str, str],
    num_positional: int,
) -> list[str]:
    """The same words, in which an option of several values is repeated with one value each.

    flags: options without a value; () where no lists are given. pairs: options whose values read NAME=VALUE; the first
    word that does not is none of theirs. lists: options whose values may be anything, and what stands for no value:
    they take all words up to the next option where num_positional others are in the line, and else one of those that
    are left with these.

    >>> line = ["--split", "a=.9", "b=.1", "rows.jsonl", "out"]
    >>> one_value_each(line, flags=(), pairs=("--split",), lists={}, num_positional=2)
    ['--split=a=.9', '--split=b=.1', 'rows.jsonl', 'out']
    """
    parts = list(_parts(words, flags, {**dict.fromkeys(pairs, is_pair), **dict.fromkeys(lists, lambda word: True)}))
    num_missing = num_positional - sum(option is None for option, _ in parts)
    made: list[str] = []
    for option, values in parts:
        if option is None or option not in {*pairs, *lists}:
            made += [*([option] if option else []), *values]
            continue
        num_taken = len(values)
        if option in lists and 0 < num_missing <= len(values):
            num_taken = min(1, len(values) - num_missing)
        taken = values[:num_taken] or ([lists[option]] if option in lists else [])
        made += [f"{option}={value}" for value in taken] if taken else [option]
        made += values[num_taken:]
    return made


def _parts(
    words: Sequence[str], flags: Collection[str], several: Mapping[str, Callable[[str], bool]]
) -> Iterator[tuple[str | None, list[str]]]:
    """Each option with its values, each other word by itself."""
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if word == "--":
            yield word, []
            yield from ((None, [each]) for each in words[index:])
            return
        if not _is_option(word):
            yield None, [word]
        elif word in several:
            end = index
            while end < len(words) and not _is_option(words[end]) and (end == index or several[word](words[end])):
                end += 1
            yield word, list(words[index:end])
            index = end
        else:
            has_value = word not in flags and "=" not in word and index < len(words) and not _is_option(words[index])
            num_values = int(has_value)
            yield word, list(words[index : index + num_values])
            index += num_values


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _NUMBER.match(word)
