"""Conversations -> tokens through a tokenizer's chat template; the loss is on the assistant's messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import DataError
from ..types import Processed, Sample
from .answers import JoinedText
from .base import Measured, Tokens, measured_tokens, or_error, processed_of, through
from .conversation import Chat, Conversations, Rendered
from .conversation import Learn as Learn
from .stored_chat import read_chat
from .tokenizers import FastTokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ChatProcessor:
    """Processor that renders `messages` with the tokenizer's chat template.

    Trained on is the text between the template's {% generation %} and {% endgeneration %} (transformers' convention for
    assistant masks). Without these marks, a message of the assistant is trained on as the whole conversation shows it,
    from the end of its header up to its own trailing white space (see answers.py). An answer of which nothing is shown
    is not trained on. Messages with "learn": false are not trained on; with learn "last", only the assistant's last
    message is. DataError for an answer that cannot be found. The template gets the tools of the sample, arguments of
    tool calls as objects, and a fixed day in place of today.

    learn_stop: if a template leaves the end of an answer to the next speaker's token (GLM's), also train on this token,
    and write it after the last answer. Without learn_stop, a warning names the template.

    ConfigError for a tokenizer without a chat template, and for a slow tokenizer.
    """

    columns = ("messages",)
    schema = "messages"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast | FastTokenizer,
        *,
        source: str = "",
        learn: Learn = "all",
        learn_stop: bool = False,
    ):
        self.tokenizer = FastTokenizer.of(tokenizer, name=source)
        self._conversations = Conversations(self.tokenizer, learn=learn, learn_stop=learn_stop)
        self._conversations.warn_of_ends()

    @property
    def learn(self) -> Learn:
        return self._conversations.learn

    @staticmethod
    def from_pretrained(
        path: str, *, learn: Learn = "all", learn_stop: bool = False, trust_remote_code: bool = False
    ) -> ChatProcessor:
        """Return a processor with the tokenizer at a local path or hub id. trust_remote_code: see load_tokenizer."""
        tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
        return ChatProcessor(tokenizer, source=path, learn=learn, learn_stop=learn_stop)

    @property
    def description(self) -> Mapping[str, Any]:
        return {"class": "ChatProcessor", "version": 3, **self._conversations.description}

    def measure(self, sample: Sample) -> int:
        return measured_tokens(self.measure_all, sample)

    def measure_all(self, samples: Sequence[Sample]) -> list[int | DataError]:
        """See MeasureAll."""
        texts = [or_error(lambda sample: self._rendered(sample).marked[0], sample) for sample in samples]
        return through(texts, partial(self.tokenizer.num_tokens, add_special_tokens=False))

    def measure_shown(self, samples: Sequence[Sample]) -> list[Measured | DataError]:
        """See MeasureShown."""
        read = self._conversations.text_and_not_shown
        shown = [or_error(read, sample["messages"], joined_text) for sample in samples]
        kept = [each for each in shown if not isinstance(each, DataError)]
        lengths = iter(self.tokenizer.num_tokens([text for text, _ in kept], add_special_tokens=False))
        return [each if isinstance(each, DataError) else Measured(next(lengths), not_shown=each[1]) for each in shown]

    def not_shown(self, samples: Sequence[Sample]) -> list[int | DataError]:
        """See NotShownOf."""
        return [or_error(lambda sample: self._conversations.not_shown(_read(sample)), sample) for sample in samples]

    def first_changed(self, samples: Sequence[Sample]) -> list[int | DataError | None]:
        """See FirstChanged."""
        return [or_error(lambda sample: self._conversations.first_changed(_read(sample)), sample) for sample in samples]

    def process(self, sample: Sample) -> Processed:
        (made,) = self.tokenize_all([sample])
        if isinstance(made, DataError):
            raise made
        return processed_of(*made)

    def tokenize_all(self, samples: Sequence[Sample]) -> list[Tokens | DataError]:
        """See TokenizeAll."""
        return through([or_error(self._rendered, sample) for sample in samples], self._conversations.tokenized)

    def _rendered(self, sample: Sample) -> Rendered:
        return self._conversations.rendered(_read(sample))


def _read(sample: Sample) -> Chat:
    """Read a chat with plain strings, for templates of text models: the texts of a message's parts are joined."""
    return Chat.of(*read_chat(sample["messages"]), joined_text)


def joined_text(parts: Sequence[dict[str, Any]]) -> JoinedText:
    """Join the text of a message's parts; DataError for media."""
    kinds = {part["type"] for part in parts} - {"text"}
    if kinds:
        name = "audio" if kinds == {"audio"} else "omni" if "audio" in kinds else "vision"
        raise DataError(
            f"a message holds {', '.join(sorted(kinds))}, which the chat processor does not read: take the processor "
            f"of media of a model's folder, with --processor {name} --tokenizer FOLDER or processor: {{type: {name}, "
            "path: FOLDER}"
        )
    return JoinedText.of(parts)
