"""A shard -> facts of the samples: counts per check and source, examples, trained shares, hashes.

Facts of tokens are computed for a group of samples at once; facts of texts for each sample.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError, LmmsStreamError
from ...mds.index import ShardInfo
from ...mds.shard import fetch_shard, open_shard
from ...processors.base import (
    IGNORED_LABEL,
    MediaWithoutTokensError,
    Processor,
    TokensWithoutMediaError,
    spans_of,
    tokenizes_all,
    works_together,
)
from ...processors.lengths import groups, sample_bytes, tells_not_shown
from ...processors.not_shown import ENDS, KINDS, amounts_of
from ...processors.stored_chat import read_chat, read_preference
from ...processors.tokenizers import FastTokenizer
from ...storage.cache import LocalCache
from ...types import Role, Sample
from .checks import MAX_EXAMPLES, NUM_SHARES, ROWS, kinds_dropped
from .repeats import NUM_HASHES, TOKENS, Codes, sketches_of
from .texts import ODD, PLACEHOLDERS, ChatTexts, SpecialTokens, around, excerpt_of, trained_piece

_KEYS_OF = {  # check of dropped content -> words that begin the content in stored messages
    "dropped-system": ('"system"', '"developer"'),
    "dropped-tools": ('"tools"',),
    "dropped-tool-calls": ('"tool_calls"', '"function_call"'),
    "dropped-tool-results": ('"tool"',),
    "dropped-reasoning": ('"reasoning', '"thinking', "<think>"),
}
_PLAIN = 2 * [{"role": "user", "content": "How much is 2 + 2?"}, {"role": "assistant", "content": "4, I think"}]
_NOT_SENT = ("_tokens", "_ends_in_special_tokens")  # to other processes, which compute the values again
_NUM_ENDING = 2  # last trained tokens of an answer that may end it: a template may add a newline
_NAMED_ERRORS = {MediaWithoutTokensError: "media-without-tokens", TokensWithoutMediaError: "tokens-without-media"}


class AuditTask(NamedTuple):
    """A shard of a dataset to read. first_id: sample id of the first sample. indices: of samples in the shard, to read.
    sources: number of the source of each index (default: a single source).
    """

    info: ShardInfo
    first_id: int
    indices: NDArray[np.int64]
    sources: NDArray[np.int64] | None = None


class ShardFacts(NamedTuple):
    """Facts of a shard's samples. counts: source -> int64[len(ROWS)]; histograms: source -> samples by trained share,
    int64[NUM_SHARES + 1]. hashes: uint64[n], of the content of each sample. sketches: see sketches_of, without rows if
    not asked for. examples: name of a check -> sample ids and excerpts. tokenizing_s, near_s: seconds in the processor,
    and for sketches.
    """

    counts: Mapping[int, NDArray[np.int64]]
    histograms: Mapping[int, NDArray[np.int64]]
    hashes: NDArray[np.uint64]
    sketches: NDArray[np.uint16]
    examples: Mapping[str, Sequence[tuple[int, str]]]
    num_trained: Mapping[int, int]
    tokenizing_s: float
    near_s: float


class _Made(NamedTuple):
    """Tokens of a sample. spans: trained tokens, [first, stop). has_media: whether tensors of media were made."""

    ids: NDArray[np.integer[Any]]
    spans: Sequence[Sequence[int]]
    has_media: bool = False
    sequences: NDArray[np.int64] | None = None


@dataclass(kw_only=True)
class Auditor:
    """Job of a pool: a shard -> ShardFacts. tokenizer: decodes tokens, optional. trains_tokens: whether labels have a
    meaning for the task. near: make sketches of the samples.
    """

    processor: Processor
    schema: str | None
    tokenizer: FastTokenizer | None
    cache: LocalCache
    packing_length: int | None = None
    overlong: str = "error"
    positions: int | None = None
    trains_tokens: bool = True
    near: bool = False

    def __call__(self, task: AuditTask, on_samples: Callable[[int], None]) -> ShardFacts:
        path = fetch_shard(self.cache, task.info)
        try:
            shard = open_shard(path, task.info, columns=self.processor.columns)
            found = _Counts(task.first_id + task.indices)
            samples = ((at, shard[index]) for at, index in enumerate(task.indices.tolist()))
            for group in groups(samples, num_bytes=lambda item: sample_bytes(item[1])):
                self._add(group[0][0], [sample for _, sample in group], found)
                on_samples(len(group))
        finally:
            if path.is_relative_to(self.cache.folder):
                path.unlink(missing_ok=True)
        return found.facts(task.sources)

    def _add(self, first: int, samples: Sequence[Sample], found: _Counts) -> None:
        """Add the facts of consecutive samples, the first at position `first`."""
        begun = time.perf_counter()
        made = self._processed(samples)
        found.tokenizing_s += time.perf_counter() - begun
        found.hashes += [_digest(sample) for sample in samples]
        found.counts[ROWS["samples"], first : first + len(samples)] = 1
        for at, each in enumerate(made, first):
            if isinstance(each, Exception):
                name = next((name for kind, name in _NAMED_ERRORS.items() if isinstance(each, kind)), "refused")
                found.note(name, at, str(each) if isinstance(each, LmmsStreamError) else repr(each))
        self._add_template(first, samples, found)
        trained = self._trained_texts(made)
        said: list[Sequence[str]] = [()] * len(samples)  # texts of each sample
        for at, (sample, one) in enumerate(zip(samples, made, strict=True)):
            tokens = None if isinstance(one, Exception) else one
            try:
                if self.schema == "messages":
                    said[at] = self._add_chat(first + at, sample, tokens, trained[at], found)
                elif self.schema == "preference":
                    said[at] = self._add_preference(first + at, sample, tokens, found)
                elif isinstance(sample.get("text"), str):
                    said[at] = [sample["text"]]
                    self._add_text(first + at, said[at], found)
            except DataError as error:  # its messages cannot be read
                if tokens is not None:
                    found.note("refused", first + at, str(error))
        self._add_tokens(first, made, found)
        if self.near:
            begun = time.perf_counter()
            found.sketches.append(sketches_of([_codes(*each) for each in zip(samples, said, made, strict=True)]))
            found.near_s += time.perf_counter() - begun

    def _processed(self, samples: Sequence[Sample]) -> list[_Made | Exception]:
        if tokenizes_all(self.processor):
            try:
                several = self.processor.tokenize_all(samples)  # type: ignore[attr-defined]
                return [each if isinstance(each, DataError) else _Made(*each) for each in several]
            except Exception:  # noqa: BLE001 - one of them: found below, one after another
                pass
        return [self._alone(sample) for sample in samples]

    def _alone(self, sample: Sample) -> _Made | Exception:
        try:
            processed = self.processor.process(sample)
        except Exception as error:  # noqa: BLE001 - a finding with its error
            return error
        ids = np.asarray(processed["input_ids"]).reshape(-1)
        labels = np.asarray(processed.get("labels", ids)).reshape(-1)
        has_media = bool(processed.get("media"))
        return _Made(ids, spans_of(labels != IGNORED_LABEL).tolist(), has_media, processed.get("sequences"))

    # Tokens, of a group at once

    def _add_tokens(self, first: int, made: Sequence[_Made | Exception], found: _Counts) -> None:
        known = [(at, each) for at, each in enumerate(made, first) if not isinstance(each, Exception)]
        if not known:
            return
        at = np.array([index for index, _ in known])
        lengths = np.array([len(each.ids) for _, each in known])
        begins = lengths.cumsum() - lengths
        ids = np.concatenate([each.ids for _, each in known])
        owners = np.repeat(np.arange(len(known)), [len(each.spans) for _, each in known])
        spans = np.array([span for _, each in known for span in each.spans], np.int64).reshape(-1, 2)
        num_trained = np.bincount(owners, weights=spans[:, 1] - spans[:, 0], minlength=len(known)).astype(np.int64)
        found.counts[ROWS["tokens"], at] = lengths
        found.num_trained[at] = num_trained
        if self.trains_tokens:
            found.shares[at] = np.rint(NUM_SHARES * num_trained / np.maximum(lengths, 1)).astype(np.int64)
            found.note_all("fully-masked", at[num_trained == 0], lambda _: "all labels are masked")
        self._add_lengths(at, lengths, owners, spans, found)
        tokens = self._tokens
        if tokens is None:
            return
        if self.trains_tokens and self.schema != "preference" and self._ends_in_special_tokens:
            self._add_ends(at, ids, begins, owners, spans, tokens, found)
        if tokens.bos is not None:
            stops = begins + lengths
            second = np.minimum(begins + 1, len(ids) - 1)
            twice = (stops - begins > 1) & (ids[np.minimum(begins, second)] == tokens.bos) & (ids[second] == tokens.bos)
            found.note_all("double-bos", at[twice], lambda _: "begins with two tokens of the beginning")
        known_ids = ids < len(tokens.are_bytes)
        sums = np.concatenate([[0], np.cumsum(tokens.are_bytes[np.where(known_ids, ids, 0)] & known_ids)])
        num_bytes = sums[begins + lengths] - sums[begins]
        for index in np.flatnonzero(num_bytes).tolist():
            share = num_bytes[index] / lengths[index]
            found.note("byte-tokens", int(at[index]), f"{share:.1%} of its tokens", count=int(num_bytes[index]))

    def _add_lengths(
        self,
        at: NDArray[np.int64],
        lengths: NDArray[np.int64],
        owners: NDArray[np.int64],
        spans: NDArray[np.int64],
        found: _Counts,
    ) -> None:
        read = lengths
        if self.packing_length is not None:
            room = self.packing_length
            found.note_all("overlong", at[lengths > room], lambda index: f"{found.num_tokens(index):,} tokens")
            if self.overlong == "truncate":
                cut = np.unique(owners[spans[:, 1] > room])
                found.note_all("cut-answers", at[cut], lambda index: f"{found.num_tokens(index):,} tokens")
            if self.overlong in ("truncate", "split"):
                read = np.minimum(lengths, room)
            elif self.overlong == "drop":
                read = np.where(lengths > room, 0, lengths)
        if self.positions is not None:
            beyond = at[read > self.positions]
            found.note_all("beyond-positions", beyond, lambda index: f"{found.num_tokens(index):,} tokens")

    def _add_ends(
        self,
        at: NDArray[np.int64],
        ids: NDArray[np.integer[Any]],
        begins: NDArray[np.int64],
        owners: NDArray[np.int64],
        spans: NDArray[np.int64],
        tokens: SpecialTokens,
        found: _Counts,
    ) -> None:
        """Count trained spans without a special token at their end, except in samples with trained prompts."""
        is_ended = found.counts[ROWS["trained-prompts"], at[owners]] > 0
        for back in range(1, _NUM_ENDING + 1):
            last = spans[:, 1] - back
            inside = last >= spans[:, 0]
            is_ended |= inside & np.isin(ids[begins[owners] + np.where(inside, last, 0)], tokens.special)
        if self.schema in ("text", "tokens"):
            found.counts[ROWS["answers"], at] = np.bincount(owners, minlength=len(at))
        for span in np.flatnonzero(~is_ended).tolist():
            start, stop = (spans[span] + begins[owners[span]]).tolist()
            found.note("untrained-ends", int(at[owners[span]]), partial(self._ending, ids[start:stop]))

    def _ending(self, ids: NDArray[np.integer[Any]]) -> str:
        return "" if self.tokenizer is None else f"ends in {self.tokenizer.decode(ids[-12:].tolist())!r}"

    # The template

    def _add_template(self, first: int, samples: Sequence[Sample], found: _Counts) -> None:
        if tells_not_shown(self.processor):
            dropped = kinds_dropped()
            for at, bits in enumerate(self.processor.not_shown(samples), first):  # type: ignore[attr-defined]
                if isinstance(bits, DataError) or not bits:
                    continue
                amounts = amounts_of(bits).tolist()
                num_ends = amounts[KINDS.index(ENDS)]
                for name, count in zip(dropped, amounts, strict=False):
                    if count:
                        found.note(name, at, partial(_from_key, samples[at - first]["messages"], name))
                if num_ends:
                    found.note(
                        "untrained-ends",
                        at,
                        f"answers with an end outside of the trained text: {num_ends}",
                        count=num_ends,
                    )
        if works_together(type(self.processor), "process", "first_changed"):
            for at, number in enumerate(self.processor.first_changed(samples), first):  # type: ignore[attr-defined]
                if isinstance(number, int):
                    found.note("changed-prefixes", at, f"message {number}, an answer")

    # Texts, sample by sample

    def _trained_texts(self, made: Sequence[_Made | Exception]) -> list[str]:
        """Return the trained text of each sample of chats; "" if unknown."""
        if self.tokenizer is None or self.schema != "messages" or not self.trains_tokens:
            return [""] * len(made)
        ids = [
            []
            if isinstance(each, Exception) or not len(each.spans)
            else np.concatenate([each.ids[start:stop] for start, stop in each.spans]).tolist()
            for each in made
        ]
        return self.tokenizer.decode_all(ids)

    def _add_chat(self, at: int, sample: Sample, made: _Made | None, trained: str, found: _Counts) -> list[str]:
        """Return the texts to compare with other samples."""
        chat = ChatTexts.of(read_chat(sample["messages"]).messages)
        found.counts[ROWS["answers"], at] = chat.num_answers
        self._add_text(at, chat.texts, found)
        for text in chat.empty:
            found.note("empty-answers", at, text)
        if chat.num_media == 0 and not found.counts[ROWS["tokens-without-media"], at]:
            for text in chat.texts:
                if (seen := PLACEHOLDERS.search(text)) is not None:
                    found.note("tokens-without-media", at, around(text, seen))
                    break
        elif chat.num_media and made is not None and not made.has_media:
            found.note("media-without-tokens", at, f"{chat.num_media} media, and the processor makes no tensors")
        if made is None or not self.trains_tokens:
            return chat.turns
        num_trained = sum(stop - start for start, stop in made.spans)
        piece = trained_piece(chat, trained)
        if piece is None and chat.prompts and num_trained and num_trained == len(made.ids):
            piece = chat.prompts[0]
        if piece is not None:
            found.note("trained-prompts", at, piece)
            return chat.turns
        last_only = getattr(self.processor, "learn", "all") == "last"
        num_missing = min(chat.num_groups, 1 if last_only else chat.num_groups) - len(made.spans)
        if num_trained and num_missing > 0:
            text = f"{len(made.spans)} of {chat.num_groups} answers are trained on"
            found.note("masked-answers", at, text, count=num_missing)
        return chat.turns

    def _add_text(self, at: int, texts: Sequence[str], found: _Counts) -> None:
        """Look for special tokens and odd characters."""
        joined = "\n".join(texts)
        if (seen := ODD.search(joined)) is not None:
            found.note("odd-characters", at, f"{seen[0]!r} in {around(joined, seen)}")
        tokens = self._tokens
        if tokens is not None and any(head in joined for head in tokens.heads):
            seen = tokens.pattern.search(joined)
            if seen is not None:
                found.note("special-tokens", at, around(joined, seen))

    def _add_preference(self, at: int, sample: Sample, made: _Made | None, found: _Counts) -> list[str]:
        """Return the texts to compare with other samples."""
        stored = read_preference(sample["messages"])
        answers = list(stored.answers.values())
        chats = [ChatTexts.of(each) if isinstance(each, list) else None for each in (stored.prompt, *answers)]
        texts = [str(each) for each in (stored.prompt, *answers) if isinstance(each, str)]
        turns = [*texts, *(text for chat in chats if chat is not None for text in chat.turns)]
        texts += [text for chat in chats if chat is not None for text in chat.texts]
        self._add_text(at, texts, found)
        found.counts[ROWS["answers"], at] = len(answers)
        for answer, chat in zip(answers, chats[1:], strict=True):
            if (isinstance(answer, str) and not answer.strip()) or (chat is not None and chat.empty):
                found.note("empty-answers", at, "an answer without text")
        if len(answers) < 2:
            return turns
        found.counts[ROWS["pairs"], at] = 1
        if answers[0] == answers[1]:
            found.note("equal-answers", at, str(answers[0]))
        chatted = [answer for answer in answers if not isinstance(answer, str)]
        asked = [[each for each in answer if each["role"] != "assistant"] for answer in chatted]
        if len(asked) == 2 and asked[0] != asked[1]:
            found.note("differing-prompts", at, " / ".join(excerpt_of(json.dumps(each), 50) for each in asked))
        if made is not None and made.sequences is not None:
            of_role = {int(role): int(length) for length, role in np.asarray(made.sequences)}
            longer = of_role[Role.CHOSEN] - of_role[Role.REJECTED]
            if longer > 0:
                found.note("length-bias", at, f"chosen is {longer:,} tokens longer")
        return turns

    @cached_property
    def _ends_in_special_tokens(self) -> bool:
        """Whether the template ends answers in a special token: a trained span without one has then lost its end.

        True if the processor does not count lost ends itself.
        """
        if not tells_not_shown(self.processor):
            return True
        made, tokens = self._alone({"messages": json.dumps(_PLAIN)}), self._tokens
        if isinstance(made, Exception) or tokens is None or not len(made.spans):
            return False
        ends = (made.ids[max(start, stop - _NUM_ENDING) : stop] for start, stop in made.spans)
        return all(np.isin(end, tokens.special).any() for end in ends)

    @cached_property
    def _tokens(self) -> SpecialTokens | None:
        return None if self.tokenizer is None else SpecialTokens.of(self.tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _NOT_SENT}


@dataclass(slots=True)
class _Counts:
    """Facts of the samples of a shard while they are read. counts: int64[len(ROWS), n]."""

    sample_ids: NDArray[np.int64]
    hashes: list[int] = field(default_factory=list)
    sketches: list[NDArray[np.uint16]] = field(default_factory=list)
    examples: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    tokenizing_s: float = 0.0
    near_s: float = 0.0
    counts: NDArray[np.int64] = field(init=False)
    shares: NDArray[np.int64] = field(init=False)  # of trained tokens, in units of 1 / NUM_SHARES; -1 if unknown
    num_trained: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        num_samples = len(self.sample_ids)
        self.counts = np.zeros((len(ROWS), num_samples), np.int64)
        self.shares = np.full(num_samples, -1)
        self.num_trained = np.zeros(num_samples, np.int64)

    def note(self, name: str, at: int, excerpt: str | Callable[[], str], *, count: int = 1) -> None:
        """Count a finding on the sample at a position. excerpt: a text, or a function that is called for an example."""
        self.counts[ROWS[name], at] += count
        shown = self.examples.setdefault(name, [])
        sample_id = int(self.sample_ids[at])
        if len(shown) < MAX_EXAMPLES and all(sample_id != other for other, _ in shown):
            shown.append((sample_id, excerpt_of(excerpt if isinstance(excerpt, str) else excerpt())))

    def note_all(self, name: str, at: NDArray[np.int64], excerpt: Callable[[int], str]) -> None:
        for index in at.tolist():
            self.note(name, index, partial(excerpt, index))

    def num_tokens(self, at: int) -> int:
        return int(self.counts[ROWS["tokens"], at])

    def facts(self, sources: NDArray[np.int64] | None) -> ShardFacts:
        """Return the sums of each source."""
        numbers = np.zeros(len(self.sample_ids), np.int64) if sources is None else sources
        counts, histograms, num_trained = {}, {}, {}
        for number in np.unique(numbers).tolist():
            own = numbers == number
            shares = self.shares[own]
            counts[number] = self.counts[:, own].sum(axis=1)
            histograms[number] = np.bincount(shares[shares >= 0], minlength=NUM_SHARES + 1)
            num_trained[number] = int(self.num_trained[own].sum())
        return ShardFacts(
            counts,
            histograms,
            np.array(self.hashes, np.uint64),
            np.concatenate([np.empty((0, NUM_HASHES), np.uint16), *self.sketches]),
            self.examples,
            num_trained,
            self.tokenizing_s,
            self.near_s,
        )


def _from_key(stored: str, name: str) -> str:
    """Return stored messages from the first key of the dropped content on."""
    starts = [stored.find(key) for key in _KEYS_OF.get(name, ())]
    return stored[max(0, min((start for start in starts if start >= 0), default=0)) :]


def _codes(sample: Sample, texts: Sequence[str], made: _Made | Exception) -> Codes:
    """Return the texts of a sample to sketch, or its tokens if it has no texts. Samples of other media differ."""
    media = sample.get("media")
    salt = _hash([media]) if isinstance(media, bytes) and media else 0
    if texts or isinstance(made, Exception):
        return Codes.of_text("\n".join(texts), salt=salt)
    return Codes(made.ids.astype(np.uint32), TOKENS, salt)


def _digest(sample: Sample) -> int:
    """Return a hash of the content of a sample, 64 bits. A column without bytes, as of media in a chat of text, is
    passed over: other processors do not read it.
    """
    values = [sample[name] for name in sorted(sample)]
    return _hash([each for each in values if not isinstance(each, bytes) or each])


def _hash(values: Sequence[Any]) -> int:
    hashed = hashlib.blake2b(digest_size=8)
    for value in values:
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        hashed.update(data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes())
        hashed.update(b"\0")
    return int.from_bytes(hashed.digest(), "little")
