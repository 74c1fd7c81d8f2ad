"""A real chat corpus from the interpreter's standard library, and a tokenizer trained on it."""

from __future__ import annotations

import ast
import json
import sysconfig
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import DataError

SKIPPED_FOLDERS = {"test", "tests", "idlelib", "site-packages", "__pycache__", "lib2to3"}
VOCABULARY = 4096
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}\n"
    "{% else %}{{ message['content'] }}<|end|>\n{% endif %}"
    "{% endfor %}"
)
_Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """functions (JSON lines, plain-string content) and classes (Parquet, content in parts), one chat a row."""

    functions: Path
    classes: Path
    num_functions: int
    num_classes: int
    texts: list[str]


def build_corpus(folder: Path, *, library: Path | None = None) -> Corpus:
    """Every documented function and class below `library` (default: the interpreter's standard library).

    Its source without the docstring asks, the docstring answers. Files are written into `folder`.
    """
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    functions, classes, texts = [], [], []
    for node, question, answer in _documented_sources(library or Path(sysconfig.get_paths()["stdlib"])):
        texts += [question, answer]
        if isinstance(node, ast.ClassDef):
            classes.append({"messages": _chat([{"type": "text", "text": question}], answer)})
        else:
            functions.append({"messages": _chat(question, answer)})
    if not functions or not classes:
        raise DataError(
            f"{library or 'the standard library'} has no documented functions and classes: is it Python source?"
        )
    with (folder / "functions.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in functions)
    for row in classes:  # one column, one type: all content in parts
        row["messages"][1]["content"] = [{"type": "text", "text": row["messages"][1]["content"]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(classes), folder / "classes.parquet")
    return Corpus(
        functions=folder / "functions.jsonl",
        classes=folder / "classes.parquet",
        num_functions=len(functions),
        num_classes=len(classes),
        texts=texts,
    )


def _chat(question: Any, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _documented_sources(library: Path) -> Iterator[tuple[_Documented, str, str]]:
    """(node, source without the docstring, docstring), file after file by name."""
    for path in sorted(library.rglob("*.py")):
        if SKIPPED_FOLDERS & set(path.relative_to(library).parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)  # of the library's own code
                tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue  # templates and samples in the library that are not Python of this version
        lines = source.splitlines(keepends=True)
        for node in _statements(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                docstring = ast.get_docstring(node)
                if docstring and docstring.strip():
                    yield node, _without_docstring(node, lines), docstring


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes of ast.walk that are statements or hold some, in its order: expressions hold none."""
    todo: deque[ast.AST] = deque([tree])
    while todo:
        node = todo.popleft()
        todo.extend(
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)
        )
        yield node


def _without_docstring(node: _Documented, lines: list[str]) -> str:
    first, last = node.body[0].lineno, node.body[0].end_lineno or node.body[0].lineno
    return "".join([*lines[node.lineno - 1 : first - 1], *lines[last : node.end_lineno]])


def train_tokenizer(texts: list[str], folder: Path) -> Path:
    """A byte-level BPE tokenizer with a chat template that marks the assistant's words, saved to `folder`.

    The files are those of transformers' save_pretrained, without the seconds that importing transformers takes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    ends = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    kind = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    settings = {
        "added_tokens_decoder": {str(token): {"content": text} | kind for token, text in enumerate(SPECIAL_TOKENS)},
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": {},
        "model_max_length": int(1e30),  # transformers' word for none
        "tokenizer_class": "PreTrainedTokenizerFast",
        **ends,
    }
    for name, fields in (("tokenizer_config", settings), ("special_tokens_map", ends)):
        text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return folder
