"""Fast tokenizers: the part of a transformers tokenizer that makes tokens of a text.

transformers imports torch, which takes seconds and 600 MiB, and tokens need no torch. A process without torch lets
another process load the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..checks import plain_path
from ..errors import ConfigError, if_folder_of_lfs_pointers
from ..versions.transformers import special_tokens_of
from .base import Tokens

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerFast


_LOAD = (
    "import sys; sys.path[:] = {path!r}; from lmms_stream.processors import tokenizers; "
    "tokenizers.write({of}, {to}, {trusts})"
)
_LOAD_TIMEOUT_S = 3600  # seconds; a tokenizer of the hub may need a download


@dataclass(frozen=True, kw_only=True)
class FastTokenizer:
    """A tokenizer that can be sent to other processes. chat_templates: by name, including "default" if it has any.

    model: content of tokenizer.json, without padding and truncation. splits_special: treat special tokens in a text as
    ordinary text.
    """

    name: str
    model: str
    chat_templates: Mapping[str, str]
    special_tokens: Mapping[str, Any]  # bos_token, eos_token, …: variables of chat templates
    eos_token_id: int | None
    splits_special: bool = False
    trust_remote_code: bool = False  # whether Python files of its folder may run

    @staticmethod
    def of(
        tokenizer: PreTrainedTokenizerFast | FastTokenizer, *, name: str = "", trust_remote_code: bool = False
    ) -> FastTokenizer:
        """Make a FastTokenizer. ConfigError for a slow tokenizer."""
        if isinstance(tokenizer, FastTokenizer):
            return tokenizer
        if not hasattr(tokenizer, "name_or_path"):
            raise ConfigError(
                f"{tokenizer!r} is not a tokenizer: give one of transformers', or make the processor of a folder "
                "or hub id, by from_pretrained"
            )
        name = name or tokenizer.name_or_path
        if not tokenizer.is_fast:
            raise ConfigError(f"tokenizer {name} is not a fast tokenizer: save a tokenizer with a tokenizer.json")
        templates: Any = tokenizer.chat_template or {}
        return FastTokenizer(
            name=name,
            model=_without_padding(tokenizer.backend_tokenizer),
            chat_templates={"default": templates} if isinstance(templates, str) else dict(templates),
            special_tokens=_as_text(special_tokens_of(tokenizer)),
            eos_token_id=tokenizer.eos_token_id,
            splits_special=bool(tokenizer.split_special_tokens),
            trust_remote_code=trust_remote_code or getattr(type(tokenizer), "_auto_class", None) is not None,
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        """Return tokens with their offsets in the text."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def ids(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[NDArray[np.int32]]:
        """Token ids of each text, int32[T], in less time than `encode` takes."""
        return [_ids_of(encoding) for encoding in self._encode_all(texts, add_special_tokens=add_special_tokens)]

    def num_tokens(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[int]:
        """Number of tokens in the result of `ids` for each text."""
        return [len(encoding) for encoding in self._encode_all(texts, add_special_tokens=add_special_tokens)]

    def _encode_all(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Encoding]:
        if self._has_threads:  # encoding a batch would start threads
            return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        encodings: list[Encoding] = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return encodings

    def ids_and_spans(self, marked: Sequence[tuple[str, Sequence[Span]]]) -> list[Tokens]:
        """Return the tokens of texts, without special tokens around them, and the tokens that have bytes of spans of
        characters.

        The tokens of a character are all in a span or all outside. Characters without tokens are skipped; a span
        without tokens is (0, 0).
        """
        if self._byte_tokens is None:
            return [self._encoded(text, spans) for text, spans in marked]
        made: list[Tokens] = []
        ids_of_all = self.ids([text for text, _ in marked], add_special_tokens=False)
        for (text, spans), ids in zip(marked, ids_of_all, strict=True):
            found = self._byte_tokens.spans(text, ids, spans)
            made.append(self._encoded(text, spans) if found is None else (ids, found))
        return made

    def _encoded(self, text: str, spans: Sequence[Span]) -> Tokens:
        encoding = self.encode(text, add_special_tokens=False)
        return _ids_of(encoding), [_tokens_of(encoding, text, span) for span in spans]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, including special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def decode_all(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the result of `decode` for several lists of tokens, in less time."""
        return list(self._tokenizer.decode_batch(ids, skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        """Id of a text that is one token; None for a text of several tokens."""
        ids = self.encode(token, add_special_tokens=False).ids
        return int(ids[0]) if len(ids) == 1 else None

    @cached_property
    def num_ids(self) -> int:
        """One more than the highest token id."""
        return 1 + max(map(int, self._tokenizer.get_vocab(with_added_tokens=True).values()))

    @cached_property
    def digest(self) -> str:
        """Digest of everything that determines the tokens of a text."""
        return digest(self.model + "splits special tokens" * self.splits_special)

    @property
    def _has_threads(self) -> bool:
        return is_parallel()

    @cached_property
    def _byte_tokens(self) -> ByteTokens | None:
        return ByteTokens.of(json.loads(self.model))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        # A token keeps its own white space. JSON escapes quotes within texts, which makes this match unique.
        tokenizer = Tokenizer.from_str(self.model.replace('"trim_offsets": true', '"trim_offsets": false'))
        tokenizer.encode_special_tokens = self.splits_special
        return tokenizer

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> FastTokenizer:
    """Load the tokenizer at a local path or hub id; ConfigError if there is no tokenizer.

    trust_remote_code: run Python files of the folder; otherwise, ConfigError for a tokenizer with needed files.
    """
    path = str(plain_path("tokenizer", path))
    if "torch" in sys.modules or "transformers" in sys.modules:
        loaded = _load(path, trust_remote_code)
        return FastTokenizer.of(loaded, name=path, trust_remote_code=trust_remote_code)
    with TemporaryDirectory() as folder:
        written = Path(folder) / "tokenizer.json"
        program = _LOAD.format(path=sys.path, of=repr(path), to=repr(str(written)), trusts=trust_remote_code)
        environment = {**os.environ, "USE_TORCH": "0", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
        try:
            subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=_LOAD_TIMEOUT_S)
        except subprocess.SubprocessError as error:
            raise ConfigError(f"tokenizer {path!r} cannot be loaded: the loading process failed ({error})") from error
        described = json.loads(written.read_bytes())
    if "error" in described:
        raise ConfigError(described["error"])
    return FastTokenizer(**described)


def write(path: str, to: str, trusts: bool) -> None:
    """Write the tokenizer at a path into a file, or the error of loading it."""
    try:
        loaded = FastTokenizer.of(_load(path, trusts), name=path, trust_remote_code=trusts)
        described = loaded.__getstate__()
    except ConfigError as error:
        described = {"error": str(error)}
    Path(to).write_text(json.dumps(described), encoding="utf-8")


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _ids_of(encoding: Encoding) -> NDArray[np.int32]:
    return np.fromiter(encoding.ids, np.int32, len(encoding))


def _tokens_of(encoding: Encoding, text: str, span: Span) -> Span:
    start, stop = span
    first = last = None
    while start < stop and (first := encoding.char_to_token(start)) is None:
        start += 1
    while start < stop and (last := encoding.char_to_token(stop - 1)) is None:
        stop -= 1
    if first is None or last is None:
        return 0, 0
    while _chars_of(encoding, text, first)[1] <= start:
        first += 1
    while _chars_of(encoding, text, last)[1] < stop:
        last += 1
    while first and _share_a_character(encoding, text, first - 1):
        first -= 1
    while last + 1 < len(encoding) and _share_a_character(encoding, text, last):
        last += 1
    return first, last + 1


def _share_a_character(encoding: Encoding, text: str, token: int) -> bool:
    """Return whether a token and the next token have bytes of the same character."""
    return _chars_of(encoding, text, token)[1] > _chars_of(encoding, text, token + 1)[0]


def _chars_of(encoding: Encoding, text: str, token: int) -> Span:
    """Characters of which a token has bytes.

    Unigram cuts adjacent unknown characters into a token per byte, and reports all characters for each token.
    """
    chars, begin, stop = encoding.token_to_chars(token) or (len(text), len(text)), token, token + 1
    if chars[1] - chars[0] < 2:
        return chars
    while begin and encoding.token_to_chars(begin - 1) == chars:
        begin -= 1
    while stop < len(encoding) and encoding.token_to_chars(stop) == chars:
        stop += 1
    data = text[slice(*chars)].encode()
    if stop - begin != len(data):
        return chars
    char = chars[0] + sum(byte & 0xC0 != 0x80 for byte in data[: token - begin + 1]) - 1
    return char, char + 1


def check_trusted(error: Exception, name: str, trust_remote_code: bool) -> None:
    """Raise ConfigError if transformers refuses code in an untrusted folder."""
    if "trust_remote_code" in str(error) and not trust_remote_code:
        raise ConfigError(
            f"{name!r} has its own Python files, which can run any code: read the files, and set trust_remote_code to "
            "true in the run's sections processor and model, or pass --setting trust_remote_code=true to a command, if "
            "you trust them"
        ) from error


def _load(path: str, trust_remote_code: bool) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    if problem := if_folder_of_lfs_pointers(path, "*token*"):
        raise ConfigError(f"tokenizer {path!r} cannot be loaded: {problem}")
    try:
        tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        check_trusted(error, path, trust_remote_code)
        first_line = str(error).splitlines()[0]
        raise ConfigError(
            f"tokenizer {path!r} cannot be loaded: {first_line.rstrip('.')}: name a folder with a tokenizer.json, or a "
            "hub id that this machine can reach"
        ) from error
    return tokenizer


def _without_padding(tokenizer: Tokenizer) -> str:
    described = json.loads(tokenizer.to_str())
    return json.dumps({**described, "padding": None, "truncation": None}, ensure_ascii=False)


def _as_text(special_tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Convert token objects to texts."""
    return {
        name: [str(each) for each in token] if isinstance(token, list) else str(token)
        for name, token in special_tokens.items()
    }


# Threads of tokenizers: one per core, unless the environment sets a number.

VARIABLE = "TOKENIZERS_PARALLELISM"  # an environment variable of the tokenizers library
ONE_THREAD = {VARIABLE: "false"}


def tokenize_in_one_thread() -> None:
    """Set this process and its children to one thread, unless the user's environment sets a number.

    Used if each core has its own process.
    """
    os.environ.setdefault(VARIABLE, ONE_THREAD[VARIABLE])


def is_parallel() -> bool:
    """Return whether a tokenizer uses several threads for several texts."""
    return os.environ.get(VARIABLE) != ONE_THREAD[VARIABLE]


# Places of the tokens of a byte-level tokenizer in a text, from their ids only.
#
# `tokenizers` takes a fifth longer to report offsets. Byte-level BPE (GPT-2, Llama 3, Qwen) cuts an unchanged text into
# tokens of known bytes: the sums of their lengths are the offsets.

Span = tuple[int, int]

_KEEPING = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")  # Split's behaviors that keep matches


@dataclass(frozen=True, slots=True)
class ByteTokens:
    """Byte lengths of tokens. num_bytes: of each token, int64[num_ids]. added: ids of tokens that are matched before a
    text is cut.

    composed: the tokenizer normalizes texts to Unicode's NFC; only texts in NFC are unchanged.
    """

    num_bytes: NDArray[np.int64]
    added: frozenset[int]
    composed: bool

    @staticmethod
    def of(tokenizer: Mapping[str, Any]) -> ByteTokens | None:
        """Read the content of tokenizer.json. Return None for a tokenizer that is not byte-level, or may change a
        text.
        """
        from tokenizers.pre_tokenizers import ByteLevel

        model, added = tokenizer["model"], tokenizer["added_tokens"]
        normalizer = (tokenizer["normalizer"] or {}).get("type")
        alphabet = set(ByteLevel.alphabet())
        if (
            model["type"] != "BPE"
            or model.get("dropout")
            or any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"))
            or not alphabet <= model["vocab"].keys()  # other vocabularies leave bytes out
            or normalizer not in (None, "NFC")
            or not _only_cuts(tokenizer["pre_tokenizer"])
            or not _only_frames(tokenizer["post_processor"])
            or not all(_is_found_as_it_is(token) for token in added)
        ):
            return None
        vocab = model["vocab"]
        contents = {token["id"]: token["content"] for token in added}
        num_bytes = np.zeros(1 + max([*vocab.values(), *contents]), np.int64)
        for token, number in vocab.items():  # each character of a token is a byte, except in added tokens
            num_bytes[number] = len(token)
        for number, content in contents.items():
            num_bytes[number] = len(content.encode())
        if not all(set(token) <= alphabet for token, number in vocab.items() if number not in contents):
            return None
        return ByteTokens(num_bytes, frozenset(contents), normalizer == "NFC")

    def spans(self, text: str, ids: NDArray[np.int32], spans: Sequence[Span]) -> list[Span] | None:
        """Convert non-empty spans of characters to spans of the tokens that have bytes of these characters.

        The tokens of a character are all in a span or all outside. None for a text that the tokenizer changes.
        """
        is_ascii = text.isascii()
        if self.composed and not is_ascii and not unicodedata.is_normalized("NFC", text):
            return None
        data = b"" if is_ascii else text.encode()
        stops = self.num_bytes.take(ids).cumsum()
        if not len(ids) or stops[-1] != len(data or text):
            return None
        if is_ascii:
            bounds = [(start, stop) for start, stop in spans]
        else:
            bounds = [(len(text[:start].encode()), len(text[:stop].encode())) for start, stop in spans]
        firsts = stops.searchsorted([start for start, _ in bounds], "right").tolist()
        lasts = stops.searchsorted([stop - 1 for _, stop in bounds], "right").tolist()
        if is_ascii:
            return [(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]
        return [_of_whole_characters(data, stops, first, last) for first, last in zip(firsts, lasts, strict=True)]


def _of_whole_characters(data: bytes, stops: NDArray[np.int64], first: int, last: int) -> Span:
    """Extend the tokens from first to last by adjacent tokens that have bytes of the same characters.

    stops: the end of each token in the UTF-8 data.
    """
    while first and _is_inside_character(data, int(stops[first - 1])):
        first -= 1
    while _is_inside_character(data, int(stops[last])):
        last += 1
    return first, last + 1


def _is_inside_character(data: bytes, offset: int) -> bool:
    """Return whether an offset of UTF-8 data is behind the first byte of a character and before its end."""
    return offset < len(data) and data[offset] & 0xC0 == 0x80


def _only_cuts(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Return whether a pre-tokenizer is byte-level and keeps all of a text."""
    steps = _steps(pre_tokenizer, "pretokenizers")
    keeps = all(
        (step["type"] == "ByteLevel" and not step["add_prefix_space"])
        or (step["type"] == "Split" and step["behavior"] in _KEEPING)
        or step["type"] == "Digits"
        for step in steps
    )
    return keeps and [step["type"] for step in steps].count("ByteLevel") == 1


def _only_frames(post_processor: Mapping[str, Any] | None) -> bool:
    """Return whether a post-processor only puts special tokens around tokens; callers do not request special tokens."""
    kinds = {step["type"] for step in _steps(post_processor, "processors")}
    return kinds <= {"ByteLevel", "TemplateProcessing"}


def _is_found_as_it_is(added: Mapping[str, Any]) -> bool:
    """Return whether an added token matches its own content, without adjacent white space."""
    content = added["content"]
    return bool(content) and unicodedata.is_normalized("NFC", content) and not (added["lstrip"] or added["rstrip"])


def _steps(of: Mapping[str, Any] | None, name: str) -> Sequence[Mapping[str, Any]]:
    if of is None:
        return []
    return list(of[name]) if of["type"] == "Sequence" else [of]
