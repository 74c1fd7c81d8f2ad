"""processing_class: the tokenizer or processor of a run, changed by the arguments."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checks import plain_path
from ...errors import ConfigError
from ...processors.tokenizers import FastTokenizer, check_trusted
from .arguments import option

if TYPE_CHECKING:
    from transformers import TrainingArguments

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # a template's mark around the assistant's words


def load_processing_class(name: str, *, trust_remote_code: bool) -> Any:
    """Load the processor of a model's folder or hub id, else its tokenizer; ConfigError without both."""
    from transformers import AutoProcessor

    name = plain_path("model", name)
    try:
        return AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no tokenizer or processor is at {name} ({str(error).splitlines()[0]}): check the model's path, or "
            "give processing_class"
        ) from error


def prepared(given: Any, arguments: TrainingArguments) -> Any:
    """Return a copy of processing_class with the end-of-text token, template and padding of the arguments.

    ConfigError for an object of another type, for an unknown token, and for a template with missing tokens.
    """
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    if not isinstance(given, PreTrainedTokenizerBase | ProcessorMixin):
        raise ConfigError(
            f"processing_class is a {type(given).__name__}: give a tokenizer or processor of transformers', or, with "
            "datasets of lmms_stream, none"
        )
    made = copy.deepcopy(given)
    tokenizer = tokenizer_of(made)
    end = option(arguments, "eos_token")
    if end is not None:
        _check_token(tokenizer, end, "eos_token")
        tokenizer.eos_token = end
    path = option(arguments, "chat_template_path")
    if path is not None:
        _take_template(made, str(path), trusts=bool(option(arguments, "trust_remote_code")))
    padding = option(arguments, "pad_token") or tokenizer.pad_token or tokenizer.eos_token
    if padding is not None:
        _check_token(tokenizer, padding, "pad_token")
        tokenizer.pad_token = padding
    return made


def tokenizer_of(processing_class: Any) -> Any:
    """Return the tokenizer, also of a processor."""
    return getattr(processing_class, "tokenizer", processing_class)


def fast_tokenizer(processing_class: Any, *, name: str) -> FastTokenizer | None:
    """Return a tokenizer for runs; None if it is not a fast tokenizer. name: folder of the tokenizer."""
    tokenizer = tokenizer_of(processing_class)
    return FastTokenizer.of(tokenizer, name=name) if tokenizer.is_fast else None


def assistant_template(processing_class: Any) -> str | None:
    """Return a chat template that marks the assistant's words; None if the tokenizer's own template does.

    TRL has templates with marks for some model families. ConfigError if it has none, or is not installed.
    """
    template = processing_class.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise ConfigError("the tokenizer has no chat template: give args.chat_template_path, or set chat_template")
    if _GENERATION.search(template):
        return None
    remedy = (
        "mark them in the template by {% generation %} … {% endgeneration %}, or convert the dataset with lmms-stream "
        "convert, whose chat processor finds them without"
    )
    try:
        from trl.chat_template_utils import get_training_chat_template
    except ImportError as error:
        raise ConfigError(
            "args.assistant_only_loss needs a chat template that marks the assistant's words, and the tokenizer's "
            f"template does not: {remedy}, or pip install trl, which has such templates for some models"
        ) from error
    try:
        found: str | None = get_training_chat_template(processing_class)
    except ValueError as error:
        raise ConfigError(
            "args.assistant_only_loss needs a chat template that marks the assistant's words; neither the tokenizer "
            f"nor TRL has such a template for this model: {remedy}"
        ) from error
    return found


def _check_token(tokenizer: Any, token: str, name: str) -> None:
    if token not in tokenizer.get_vocab():
        raise ConfigError(
            f"args.{name} {token!r} is not a token of the tokenizer: name an existing token, or add the token first"
        )


def _take_template(processing_class: Any, path: str, *, trusts: bool) -> None:
    """Set the template from a file, or from another tokenizer together with its end-of-text token."""
    if path.endswith((".jinja", ".j2")) and Path(path).is_file():
        processing_class.chat_template = Path(path).read_text(encoding="utf-8")
        return
    from transformers import AutoTokenizer

    try:
        source = AutoTokenizer.from_pretrained(path, trust_remote_code=trusts)
    except (OSError, ValueError) as error:
        check_trusted(error, path, trusts)
        raise ConfigError(
            f"args.chat_template_path {path} is neither a file *.jinja nor a tokenizer's folder or name "
            f"({str(error).splitlines()[0]}): name one of them"
        ) from error
    tokenizer = tokenizer_of(processing_class)
    known = tokenizer.get_vocab()
    missing = [str(token) for token in source.added_tokens_decoder.values() if str(token) not in known]
    if missing:
        raise ConfigError(
            f"the template of args.chat_template_path {path} comes with tokens that this tokenizer does not have "
            f"({', '.join(missing[:5])}): add them, resize the model's embedding, and save both first"
        )
    processing_class.chat_template = source.get_chat_template()
    tokenizer.eos_token = source.eos_token
