"""Answers to compare -> tokens: each answer after its own prompt, equal to TRL's DPO and KTO trainers."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, DataError
from ..types import Processed, Role, Sample
from .base import IGNORED_LABEL, Compared, Measured, SeenMedium, measured_tokens, or_error, through
from .chat import joined_text
from .conversation import Chat, Conversations
from .multimodal import MultimodalProcessor
from .stored_chat import StoredPreference, read_preference
from .tokenizers import FastTokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class PreferenceProcessor:
    """Tokens of a prompt with its chosen answer, then of the prompt with its rejected answer; or of the prompt with a
    single answer.

    Chats are rendered by the tokenizer's chat template. Texts have the tokenizer's special tokens around them, and its
    end-of-text token after the answer. A sequence is trained on from its first difference to the tokens of the prompt
    without an answer (of a chat, with the template's generation prompt); both sequences of a pair, from the earlier
    difference. TRL does the same. `sequences` are the number of tokens and the role of each sequence, int64[k, 2]; see
    Role.

    objective: the samples' task, "dpo" for pairs and "kto" for single answers; it changes no tokens. Samples are never
    cut, because the rest would no longer be answers to compare.

    ConfigError for a slow tokenizer, for a chat without a chat template, and for texts without an end-of-text token.
    """

    columns = ("messages",)
    schema = "preference"
    gives_sequences = True

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast | FastTokenizer, *, source: str = "", objective: Compared = "dpo"
    ):
        self.tokenizer = FastTokenizer.of(tokenizer, name=source)
        self.objective = checked_objective(objective)

    @staticmethod
    def from_pretrained(
        path: str, *, objective: Compared = "dpo", trust_remote_code: bool = False
    ) -> PreferenceProcessor:
        """Return a processor with the tokenizer at a local path or hub id. trust_remote_code: see load_tokenizer."""
        tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
        return PreferenceProcessor(tokenizer, source=path, objective=objective)

    @property
    def description(self) -> Mapping[str, Any]:
        has_template = "default" in self.tokenizer.chat_templates
        return {
            "class": "PreferenceProcessor",
            "version": 1,
            **(self._conversations.description if has_template else {"tokenizer": self.tokenizer.digest}),
            "eos_token": self.tokenizer.special_tokens.get("eos_token"),
        }

    def measure(self, sample: Sample) -> int:
        return measured_tokens(self.measure_all, sample)

    def measure_all(self, samples: Sequence[Sample]) -> list[int | DataError]:
        """See MeasureAll."""
        made = [or_error(lambda sample: self._texts(read_preference(sample["messages"])), each) for each in samples]
        texts = [each for each in made if isinstance(each, _Texts)]
        encoded = {
            is_chat: iter(
                self.tokenizer.ids(
                    [text for each in texts if each.is_chat is is_chat for text in (each.prompt, *each.texts)],
                    add_special_tokens=not is_chat,
                )
            )
            for is_chat in {each.is_chat for each in texts}
        }
        return [
            each
            if isinstance(each, DataError)
            else or_error(_num_tokens, [next(encoded[each.is_chat]) for _ in range(1 + len(each.texts))])
            for each in made
        ]

    def not_shown(self, samples: Sequence[Sample]) -> list[int | DataError]:
        """See NotShownOf."""
        return [or_error(self._not_shown, sample) for sample in samples]

    def _not_shown(self, sample: Sample) -> int:
        stored = read_preference(sample["messages"])
        if isinstance(stored.prompt, str):
            return 0
        bits = 0
        for answer in stored.answers.values():
            chat = Chat.of(copy.deepcopy([*stored.prompt, *answer]), stored.tools, joined_text)
            bits |= self._conversations.not_shown(replace(chat, left_out=frozenset(range(len(stored.prompt)))))
        return bits

    def process(self, sample: Sample) -> Processed:
        stored = read_preference(sample["messages"])
        made = self._texts(stored)
        prompt, *answers = self.tokenizer.ids([made.prompt, *made.texts], add_special_tokens=not made.is_chat)
        return sequences_of(prompt, answers, stored.roles)

    def _texts(self, stored: StoredPreference) -> _Texts:
        if isinstance(stored.prompt, str):
            end = self.tokenizer.special_tokens.get("eos_token")
            if end is None:
                raise ConfigError(
                    f"tokenizer {self.tokenizer.name} has no end-of-text token: set tokenizer.eos_token and save it"
                )
            answers = [str(each) for each in stored.answers.values()]
            texts = [stored.prompt + each + ("" if each.endswith(end) else end) for each in answers]
            return _Texts(stored.prompt, texts, is_chat=False)
        chats, prompt = self._conversations, Chat.of(stored.prompt, stored.tools, joined_text)
        answered = [
            Chat.of(each, stored.tools, joined_text) for each in stored.answers.values() if not isinstance(each, str)
        ]
        if any(each.left_out for each in answered):
            raise DataError(LEFT_OUT)
        left_out = frozenset(range(len(prompt.messages)))
        whole = [replace(prompt, messages=prompt.messages + each.messages, left_out=left_out) for each in answered]
        for chat in whole:
            learnt = {*chat.spoken} - left_out
            if learnt and learnt <= chats.unshown(chat):
                raise DataError(UNSHOWN_ANSWER)
        before, texts = chats.text(prompt, prompt=True), [chats.text(chat) for chat in whole]
        if not all(text.startswith(before) for text in texts):  # the template changes the prompt if an answer follows
            beginnings = [before, *map(chats.beginning, whole)]
            before = max(beginnings, key=lambda each: len(commonprefix([each, *texts])))  # noqa: RUF071 - no paths
        return _Texts(before, texts, is_chat=True)

    @cached_property
    def _conversations(self) -> Conversations:
        return Conversations(self.tokenizer, learn="all", learn_stop=None)


LEFT_OUT = (
    "the loss leaves out a message of an answer, and answers are compared as a whole: remove that, or convert without "
    "--learn last"
)


UNSHOWN_ANSWER = (
    "the chat template shows nothing of an answer, so no token would be compared: use a template that shows it, or "
    "remove the row"
)


class _Texts(NamedTuple):
    """A prompt, and the text of the prompt with each of its answers. is_chat: whether a template wrote the texts; then
    no special tokens are added.
    """

    prompt: str
    texts: list[str]
    is_chat: bool


def _num_tokens(encoded: Sequence[NDArray[np.int32]]) -> int:
    """Number of tokens of all answers. encoded: the prompt, and the prompt with each answer."""
    _num_prompt(*encoded)
    return sum(map(len, encoded[1:]))


def checked_objective(objective: Compared) -> Compared:
    """Return the objective; ConfigError if it is unknown."""
    if objective not in get_args(Compared):
        raise ConfigError(f"processor.objective must be {' or '.join(get_args(Compared))}, got {objective!r}")
    return objective


def sequences_of(
    prompt: NDArray[np.integer[Any]], answers: Sequence[NDArray[np.integer[Any]]], roles: Sequence[Role]
) -> dict[str, Any]:
    """Join sequences: input_ids and labels int64[T], sequences int64[k, 2]. prompt: tokens of only the prompt; answers:
    of the prompt with each answer.

    DataError for an answer that adds no tokens to its prompt.
    """
    num_prompt = _num_prompt(prompt, *answers)
    input_ids = np.concatenate(answers).astype(np.int64)
    labels, start = input_ids.copy(), 0
    for ids in answers:
        labels[start : start + num_prompt] = IGNORED_LABEL
        start += len(ids)
    sequences = [(len(ids), role) for ids, role in zip(answers, roles, strict=True)]
    return {"input_ids": input_ids, "labels": labels, "sequences": np.array(sequences, np.int64)}


def _num_prompt(prompt: NDArray[np.integer[Any]], *answers: NDArray[np.integer[Any]]) -> int:
    """Number of tokens before all answers; DataError for an answer without more tokens."""
    num_prompt = len(prompt)
    for ids in answers:
        num = min(num_prompt, len(ids))
        differ = np.flatnonzero(ids[:num] != prompt[:num])
        num_prompt = int(differ[0]) if len(differ) else num
    if any(len(ids) == num_prompt for ids in answers):
        raise DataError("an answer adds no tokens to its prompt, so no token would be trained on: remove the row")
    return num_prompt


# Answers to compare whose prompts have media.


class MediaPreferenceProcessor:
    """Processor like PreferenceProcessor, for chats with media. Each sequence repeats the media of its prompt, because
    a sequence sees no other. Positions and tensors of sequences are joined in order. DataError for samples of texts.
    """

    columns = ("messages", "media")
    measured_columns = ("messages",)
    schema = "preference"
    gives_sequences = True

    def __init__(self, processor: MultimodalProcessor, *, objective: Compared = "dpo"):
        self.processor = processor
        self.objective = checked_objective(objective)
        self.tokenizer = processor.tokenizer

    @property
    def description(self) -> Mapping[str, Any]:
        return {"class": "MediaPreferenceProcessor", "version": 1, "processor": dict(self.processor.description)}

    def measure(self, sample: Sample) -> int:
        return measured_tokens(self.measure_media, sample)

    def measure_media(self, samples: Sequence[Sample]) -> list[Measured | DataError]:
        """See MeasureMedia."""
        made = [or_error(_chats, sample) for sample in samples]
        chats = [chat for each in made if not isinstance(each, DataError) for chat in each]
        found = iter(self.processor.measure_media(chats))

        def summed(num_answers: int) -> Measured | DataError:
            lengths = [next(found) for _ in range(num_answers)]
            error = next((each for each in lengths if isinstance(each, DataError)), None)
            return error or Measured(*map(sum, zip(*lengths, strict=True)))

        return through(made, lambda of_samples: [summed(len(each)) for each in of_samples])

    def not_shown(self, samples: Sequence[Sample]) -> list[int | DataError]:
        """See NotShownOf."""
        return [or_error(self._not_shown, sample) for sample in samples]

    def _not_shown(self, sample: Sample) -> int:
        bits = 0
        for each in self.processor.not_shown(_chats(sample)):
            if isinstance(each, DataError):
                raise each
            bits |= each
        return bits

    def process(self, sample: Sample) -> Processed:
        stored = _read(sample)
        prompt = self.processor.prompt_ids(_chat(stored, stored.prompt, sample))
        parts = [self.processor.process(chat) for chat in _chats(sample)]
        made = sequences_of(prompt, [part["input_ids"] for part in parts], stored.roles)
        made["labels"][~self.processor.is_learnable(made["input_ids"])] = IGNORED_LABEL
        for name in ("position_ids", "token_inputs"):
            if name in parts[0]:
                made[name] = _behind_each_other([part[name] for part in parts], axis=-1)
        made["media"] = _behind_each_other([part["media"] for part in parts], axis=0)
        return made

    def see_media(self, sample: Sample) -> list[SeenMedium]:
        """See SeeMedia."""
        seen: list[SeenMedium] = []
        first = 0
        for chat in _chats(sample):
            for medium in self.processor.see_media(chat):
                seen.append(medium._replace(spans=[(start + first, stop + first) for start, stop in medium.spans]))
            first += self.processor.measure(chat)
        return seen


def _read(sample: Sample) -> StoredPreference:
    stored = read_preference(sample["messages"])
    if isinstance(stored.prompt, str):
        raise DataError(
            "it is of texts, and a processor of media reads chats: name processor.tokenizer in place of processor.path"
        )
    return stored


def _chats(sample: Sample) -> list[Sample]:
    """Make the messages sample of each sequence."""
    stored = _read(sample)
    answers = [list(answer) for answer in stored.answers.values()]
    if any(isinstance(message, dict) and not message.get("learn", True) for each in answers for message in each):
        raise DataError(LEFT_OUT)
    return [_chat(stored, [*stored.prompt, *answer], sample) for answer in answers]


def _chat(stored: StoredPreference, messages: Any, sample: Sample) -> Sample:
    text = json.dumps({"messages": messages, "tools": stored.tools})
    return {"messages": text, **({"media": sample["media"]} if "media" in sample else {})}


def _behind_each_other(values: Sequence[Any], *, axis: int) -> Any:
    """Concatenate arrays, or arrays by name."""
    if isinstance(values[0], Mapping):
        names = dict.fromkeys(name for value in values for name in value)
        return {
            name: _behind_each_other([value[name] for value in values if name in value], axis=axis) for name in names
        }
    return np.concatenate(values, axis=axis)
