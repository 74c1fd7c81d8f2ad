"""Fast tokenizers: the part of a transformers tokenizer that makes tokens of a text.

transformers imports torch, which takes seconds and 600 MiB, and tokens need no torch. A process without torch lets
another process load the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..checks import plain_path
from ..errors import ConfigError, if_folder_of_lfs_pointers
from ..versions.transformers import RULES_OF_TOKENIZERS, RulesOfTokenizers, special_tokens_of
from .base import Tokens, keep, read_kept
from .byte_pairs import BytePairs, LazyBytePairs
from .byte_tokens import ByteTokens, Span

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
            special_tokens={
                name: [*map(str, token)] if isinstance(token, list) else str(token)
                for name, token in special_tokens_of(tokenizer).items()
            },
            eos_token_id=tokenizer.eos_token_id,
            splits_special=bool(tokenizer.split_special_tokens),
            trust_remote_code=trust_remote_code or getattr(type(tokenizer), "_auto_class", None) is not None,
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        """Return tokens with their offsets in the text."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def ids(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[NDArray[np.int32]]:
        """Token ids of each text, int32[T], in less time than `encode` takes."""
        made = self._encode_all(texts, add_special_tokens=add_special_tokens)
        return [each if isinstance(each, np.ndarray) else _ids_of(each) for each in made]

    def num_tokens(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[int]:
        """Number of tokens in the result of `ids` for each text."""
        return [*map(len, self._encode_all(texts, add_special_tokens=add_special_tokens))]

    def _encode_all(self, texts: Sequence[str], *, add_special_tokens: bool) -> Sequence[Encoding | NDArray[np.int32]]:
        lazy = self._lazy_pairs
        lazy.num_chars += sum(map(len, texts))
        pairs = lazy.pairs if lazy.num_chars < lazy.next_look else lazy.look()
        if pairs is not None:
            return self._encode_by(pairs, texts, add_special_tokens=add_special_tokens)
        if os.environ.get(VARIABLE) != ONE_THREAD[VARIABLE]:  # encoding a batch would start threads
            return [self._tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        encodings: list[Encoding] = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return encodings

    def _encode_by(
        self, pairs: BytePairs, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[NDArray[np.int32]]:
        made: list[NDArray[np.int32]] = []
        for text in texts:
            if (ids := pairs.ids(text)) is None:
                ids = _ids_of(self.encode(text, add_special_tokens=False))
            made.append(ids)
        if not add_special_tokens:
            return made
        before, after = self.around
        return [np.concatenate([before, ids, after]) for ids in made]

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
        starts, stops = _chars_of(encoding, text)
        found: list[Span] = []
        for start, stop in spans:
            first, last = int(stops.searchsorted(start, "right")), int(starts.searchsorted(stop)) - 1
            while 0 < first <= last and stops[first - 1] > starts[first]:
                first -= 1
            while first <= last < len(stops) - 1 and stops[last] > starts[last + 1]:
                last += 1
            found.append((first, last + 1) if start < stop and first <= last else (0, 0))
        return _ids_of(encoding), found

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
    def around(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Special tokens before and after a text, int32[T] each."""
        framed = self.encode("a", add_special_tokens=True)
        own = np.flatnonzero(np.array(framed.special_tokens_mask) == 0)
        ids = _ids_of(framed)
        return ids[: own[0]], ids[own[-1] + 1 :]

    @cached_property
    def num_ids(self) -> int:
        """One more than the highest token id."""
        return 1 + max(map(int, self._tokenizer.get_vocab(with_added_tokens=True).values()))

    @cached_property
    def digest(self) -> str:
        """Digest of everything that determines the tokens of a text."""
        return digest(self.model + "splits special tokens" * self.splits_special)

    @cached_property
    def _byte_tokens(self) -> ByteTokens | None:
        start, merges, _ = self.model.partition(', "merges": ')  # the merges are long, and not needed
        return ByteTokens.of(json.loads(start + "}}" * bool(merges)))

    @cached_property
    def _lazy_pairs(self) -> LazyBytePairs:
        return LazyBytePairs(self.model, digest=lambda: self.digest, parts=lambda: (self._tokenizer, self._byte_tokens))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(_without_trimming(self.model))
        tokenizer.encode_special_tokens = self.splits_special
        return tokenizer

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> FastTokenizer:
    """Load the tokenizer at a local path or hub id; ConfigError if there is no tokenizer.

    transformers is asked only if the files do not determine the tokenizer; its answer is kept for later calls.
    trust_remote_code: run Python files of the folder; otherwise, ConfigError for a tokenizer with needed files.
    """
    path = str(plain_path("tokenizer", path))
    if (read := _read(Path(path), trust_remote_code)) is not None:
        return read
    described = {
        "files": _digests_of(Path(path)),
        "transformers": version("transformers"),
        "trust_remote_code": trust_remote_code,
        "reader": 1,
    }
    fields = read_kept("tokenizers", described) if described["files"] else None
    if fields is None:
        fields = _ask(path, trust_remote_code)
        if described["files"]:
            keep("tokenizers", described, fields)
    return FastTokenizer(**{**fields, "name": path})


def _ask(path: str, trust_remote_code: bool) -> dict[str, Any]:
    """Return the fields of the tokenizer that transformers loads."""
    if "torch" in sys.modules or "transformers" in sys.modules:
        return _load(path, trust_remote_code).__getstate__()
    with TemporaryDirectory() as folder:
        written = Path(folder) / "tokenizer.json"
        program = _LOAD.format(path=sys.path, of=repr(path), to=repr(str(written)), trusts=trust_remote_code)
        environment = {**os.environ, "USE_TORCH": "0", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
        try:
            subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=_LOAD_TIMEOUT_S)
        except subprocess.SubprocessError as error:
            raise ConfigError(f"tokenizer {path!r} cannot be loaded: the loading process failed ({error})") from error
        fields: dict[str, Any] = json.loads(written.read_bytes())
    if "error" in fields:
        raise ConfigError(fields["error"])
    return fields


def write(path: str, to: str, trusts: bool) -> None:
    """Write the tokenizer at a path into a file, or the error of loading it."""
    try:
        described = _load(path, trusts).__getstate__()
    except ConfigError as error:
        described = {"error": str(error)}
    Path(to).write_text(json.dumps(described), encoding="utf-8")


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _ids_of(encoding: Encoding) -> NDArray[np.int32]:
    return np.fromiter(encoding.ids, np.int32, len(encoding))


def _chars_of(encoding: Encoding, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and one-past-last character of which each token has bytes, int64[T] each, ascending.

    Unigram cuts adjacent unknown characters into a token per byte, and reports all characters for each token.
    """
    made: list[Span] = []
    for chars, tokens in groupby(encoding.offsets):
        num_tokens, part = len([*tokens]), text[slice(*chars)]
        if num_tokens > 1 and num_tokens == len(part.encode()):
            made += [(chars[0] + at, chars[0] + at + 1) for at, char in enumerate(part) for _ in char.encode()]
        else:
            made += [chars] * num_tokens
    starts, stops = np.array(made, np.int64).reshape(-1, 2).T
    return np.maximum.accumulate(starts), np.maximum.accumulate(stops)


def check_trusted(error: Exception, name: str, trust_remote_code: bool) -> None:
    """Raise ConfigError if transformers refuses code in an untrusted folder."""
    if "trust_remote_code" in str(error) and not trust_remote_code:
        raise ConfigError(
            f"{name!r} has its own Python files, which can run any code: read the files, and set trust_remote_code to "
            "true in the run's sections processor and model (LMMS Engine: in extra_kwargs of processor_config), or "
            "pass --setting trust_remote_code=true to a command, if you trust them"
        ) from error


def _load(path: str, trust_remote_code: bool) -> FastTokenizer:
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
    return FastTokenizer.of(tokenizer, name=path, trust_remote_code=trust_remote_code)


def _without_padding(tokenizer: Tokenizer) -> str:
    described = json.loads(tokenizer.to_str())
    return json.dumps({**described, "padding": None, "truncation": None}, ensure_ascii=False)


def _without_trimming(model: str) -> str:
    """Return JSON of a tokenizer whose tokens keep their white space: quotes within texts are escaped in JSON."""
    return model.replace('"trim_offsets": true', '"trim_offsets": false')


# Tokenizers from their files alone, equal to those that the classes of transformers make of the files.

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LEGACY = ("special_tokens_map.json", "added_tokens.json")  # files that count without added_tokens_decoder
_FILES = ("*token*.json", "config.json", "vocab*", "merges.txt", "*.model", "**/*.jinja", "*.py")
_ONLY_TOKENS = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {},
}  # the post-processor of a tokenizer.json without one
_OTHER_LOADERS = {"auto_map", "fast_tokenizer_files", "init_inputs"}  # in tokenizer_config.json


def _digests_of(folder: Path) -> dict[str, str]:
    """Return the digest of each file of a tokenizer in a folder; {} without a tokenizer.json."""
    if not (folder / "tokenizer.json").is_file():
        return {}
    files = {file for pattern in _FILES for file in folder.glob(pattern) if file.is_file()}
    return {
        str(file.relative_to(folder)): hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
        for file in sorted(files)
    }


def _read(folder: Path, trust_remote_code: bool) -> FastTokenizer | None:
    """Read a tokenizer from the files of a folder; None if the files do not determine it, or are damaged."""
    from tokenizers import AddedToken, Tokenizer

    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        file = folder / "config.json"
        of_model = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"model_type": None}
        model_type = of_model["model_type"]
        kind = config["tokenizer_class"]
        rules = RULES_OF_TOKENIZERS.get(kind) or RULES_OF_TOKENIZERS[kind.removesuffix("Fast")]
        has_code = "AutoTokenizer" in (of_model.get("auto_map") or {})
        if has_code or (model_type and not re.fullmatch(rules.types, model_type)) or _OTHER_LOADERS & config.keys():
            return None
        tokenizer = Tokenizer.from_buffer((folder / "tokenizer.json").read_bytes())
        special, templates = _special_tokens(rules, config), _templates_of(folder, config)
        if not _has_tokens_of(folder, config, tokenizer):
            return None
    except Exception:  # noqa: BLE001 - tokenizers raises no other class; transformers then reports what is wrong
        return None
    present = {str(token) for token in tokenizer.get_added_tokens_decoder().values()}
    tokens = [token for each in special.values() for token in (each if isinstance(each, list) else [each])]
    missing = [AddedToken(token, special=True) for token in dict.fromkeys(tokens) if token not in present]
    tokenizer.add_tokens(missing)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    model, parts = _by_rules(rules, tokenizer, special)
    if not model or config.get("add_prefix_space") or (missing and "AddedToken" in str(config)):
        return None
    end = special.get("eos_token")
    read = FastTokenizer(
        name=str(folder),
        model=model,
        chat_templates=templates,
        special_tokens=special,
        eos_token_id=None if end is None else tokenizer.token_to_id(end),
        splits_special=bool(config.get("split_special_tokens", False)),
        trust_remote_code=trust_remote_code,
    )
    if not read.splits_special:  # parsed already
        _replace_parts(tokenizer, parts)
        read.__dict__["_tokenizer"] = tokenizer
    return read


def _has_tokens_of(folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer's added tokens are those of its other files."""
    added = {number: token.__getstate__() for number, token in tokenizer.get_added_tokens_decoder().items()}
    of_model = tokenizer.get_vocab_size(with_added_tokens=False)
    behind = [number for number in sorted(added) if number >= of_model]
    if tokenizer.padding or behind != [*range(of_model, of_model + len(behind))]:
        return False
    if "added_tokens_decoder" not in config:
        return not any((folder / name).exists() for name in _LEGACY)
    return {int(number): token for number, token in config["added_tokens_decoder"].items()} == added


def _special_tokens(rules: RulesOfTokenizers, config: Mapping[str, Any]) -> dict[str, Any]:
    """Special tokens by name, and a list of those without a name."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    others = extra if isinstance(extra, dict) else {}
    own = [name for name, token in config.items() if name.endswith("_token") and isinstance(token, str)]
    values = {**rules.tokens, **config, **others}
    special: dict[str, Any] = {
        name: _content_of(values[name]) for name in dict.fromkeys([*_NAMED, *own, *others]) if values.get(name)
    }
    if extra and not others:
        special["additional_special_tokens"] = [_content_of(each) for each in extra]
    return special


def _by_rules(rules: RulesOfTokenizers, tokenizer: Tokenizer, special: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the model of a FastTokenizer, and the parts of its tokenizer; "" if the rules are for other files."""
    start, model, rest = _without_padding(tokenizer).partition(', "model": {')
    parts = json.loads(start + "}")
    if parts["post_processor"] is None:
        parts["post_processor"] = _ONLY_TOKENS
    if rules.needs_bytes and "ByteLevel" not in str(parts["pre_tokenizer"]):
        return "", {}
    if rules.parts:  # the class adds all tokens again, and sets these parts
        for token in parts["added_tokens"]:
            token["special"] |= token["content"] in special.values()
        if rules.decoder:
            parts["decoder"] = rules.decoder
            trimmed = json.dumps(parts["pre_tokenizer"]).replace('"trim_offsets": false', '"trim_offsets": true')
            parts["pre_tokenizer"] = json.loads(trimmed)
        own = [parts[name] for name in ("normalizer", "pre_tokenizer", "decoder")]
        if digest(json.dumps(own) + rest.partition('"vocab": ')[0]) != rules.parts:
            return "", {}
    described = json.dumps(parts, ensure_ascii=False)[:-1]
    return described + model + rest, json.loads(_without_trimming(described) + "}")


def _replace_parts(tokenizer: Tokenizer, parts: Mapping[str, Any]) -> None:
    from tokenizers import Tokenizer

    without_vocabulary = {**parts, "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    source = Tokenizer.from_str(json.dumps(without_vocabulary))
    for name in ("pre_tokenizer", "post_processor", "decoder"):
        setattr(tokenizer, name, getattr(source, name))


def _content_of(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _templates_of(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    templates = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    in_config = config.get("chat_template") or {}
    if isinstance(in_config, list):
        in_config = {each["name"]: each["template"] for each in in_config}
    return templates or ({"default": in_config} if isinstance(in_config, str) else dict(in_config))


# Threads of tokenizers: one per core, unless the environment sets a number.

VARIABLE = "TOKENIZERS_PARALLELISM"  # an environment variable of the tokenizers library
ONE_THREAD = {VARIABLE: "false"}


def tokenize_in_one_thread() -> None:
    """Set this process and its children to one thread, unless the user's environment sets a number.

    Used if each core has its own process.
    """
    os.environ.setdefault(VARIABLE, ONE_THREAD[VARIABLE])
