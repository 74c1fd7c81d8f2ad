"""Errors of this package: what built-in exceptions they are, and the remedy for an unknown name."""

from __future__ import annotations

import ast
import dataclasses
import logging
import pickle
from collections.abc import Iterator, Sequence

import lmms_stream.errors as errors
import pytest
from lmms_stream.errors import (
    ConfigError,
    DataError,
    LmmsStreamError,
    ObjectChangedError,
    StorageError,
    did_you_mean,
)
from lmms_stream.train.run.settings import TrainConfig

from .arrows import files, trees

KNOWN = ("torch_dtype", "attention", "image_min_pixels", "image_max_pixels", "loss_scale")


@pytest.mark.parametrize(
    ("name", "known", "remedy"),
    [
        ("torch_dtyp", KNOWN, "did you mean 'torch_dtype'?"),
        ("token", ["tokens", "bytes_per_token"], "did you mean 'tokens'?"),
        ("atention", KNOWN, "did you mean 'attention'?"),
        ("image_max_pixel", KNOWN, "did you mean 'image_max_pixels'?"),
        ("max_pixels", KNOWN, "did you mean 'image_max_pixels'?"),
        ("image_max_size", KNOWN, f"choose one of {', '.join(KNOWN)}"),
        ("pixels", KNOWN, "did you mean 'image_min_pixels' or 'image_max_pixels'?"),
        ("model_type", KNOWN, f"choose one of {', '.join(KNOWN)}"),
        ("colour", KNOWN, f"choose one of {', '.join(KNOWN)}"),
        (7, KNOWN, f"choose one of {', '.join(KNOWN)}"),
        ("colour", [], "leave it out"),
        ("colour", [f"key_{number}" for number in range(31)], "leave it out"),
    ],
)
def test_a_name_is_suggested_only_if_it_could_have_been_meant(name: object, known: Sequence[str], remedy: str) -> None:
    assert did_you_mean(name, known) == remedy


def test_the_path_of_a_section_stands_before_each_name() -> None:
    assert did_you_mean("sead", ["seed"], prefix="train.") == "did you mean 'train.seed'?"
    assert did_you_mean("colour", ["a", "b"], prefix="x.") == "choose one of x.a, x.b"


def test_arguments_of_transformers_are_not_taken_for_other_settings() -> None:
    settings = [field.name for field in dataclasses.fields(TrainConfig)]
    for argument in ("deepspeed", "ddp_timeout", "hub_token", "data_seed", "save_safetensors", "tpu_num_cores"):
        assert did_you_mean(argument, settings, otherwise="look it up") == "look it up"


BUILT_IN = {
    "ConfigError": ValueError, "DataError": ValueError, "EmptyRowError": ValueError, "StorageError": OSError,
    "ObjectMissingError": FileNotFoundError, "ObjectHiddenError": FileNotFoundError, "ObjectChangedError": OSError,
    "ShardError": ValueError, "LengthsError": ValueError, "PackingError": ValueError, "CursorError": ValueError,
    "CheckpointError": RuntimeError, "WorkerError": RuntimeError, "TrainingError": RuntimeError,
    "TargetExistsError": FileExistsError,
}  # fmt: skip
CAUGHT = {"ValueError", "OSError", "RuntimeError", "FileNotFoundError"}


def test_each_error_is_also_the_built_in_exception_that_fits() -> None:
    ours = {name: each for name, each in vars(errors).items() if name.endswith("Error") and each is not LmmsStreamError}
    assert ours.keys() == BUILT_IN.keys()
    for name, error in ours.items():
        assert issubclass(error, LmmsStreamError)
        assert issubclass(error, BUILT_IN[name]), name


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_error_says_its_message_whatever_else_it_is(name: str) -> None:
    error = getattr(errors, name)("s3://bucket/a: the rule: the remedy")
    assert str(error).startswith("s3://bucket/a")


def test_handlers_of_built_in_exceptions_let_errors_of_this_package_through() -> None:
    """Held for errors raised in the body of a `try`, for calls of what a function was given, and context managers."""
    wrong = []
    for module, path in files().items():
        if not any(name in path.read_text() for name in CAUGHT):
            continue
        for function in (node for node in ast.walk(trees()[module]) if isinstance(node, ast.FunctionDef)):
            is_manager = "contextmanager" in map(ast.unparse, function.decorator_list)
            given = {each.arg for each in [*function.args.args, *function.args.kwonlyargs]}
            for node in _statements(function.body):
                if isinstance(node, ast.Try) and _takes_ours(node, is_manager=is_manager, given=given):
                    wrong.append(f"{module}:{node.lineno}")
    assert wrong == []


def _takes_ours(node: ast.Try, *, is_manager: bool, given: set[str]) -> bool:
    """Whether an error of ours in the body ends in a handler of built-in exceptions."""
    for handler in node.handlers:
        caught = set() if handler.type is None else {ast.unparse(each) for each in _types(handler.type)}
        if any(hasattr(errors, name) for name in caught):
            return False
        if caught & CAUGHT:
            inside = [*_statements(node.body)]
            calls = {ast.unparse(each.func) for each in inside if isinstance(each, ast.Call)}
            is_around = is_manager and any(isinstance(each, ast.Yield) for each in inside)
            return (
                is_around
                or bool(calls & given)
                or any(isinstance(each, ast.Raise) and _is_ours(each) for each in inside)
            )
    return False


def _types(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _is_ours(node: ast.Raise) -> bool:
    return isinstance(node.exc, ast.Call) and hasattr(errors, ast.unparse(node.exc.func))


def _statements(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """What runs inside a body, without functions that it only defines."""
    waiting: list[ast.AST] = [*body]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://h/a.tar?X-Amz-Credential=K&X-Amz-Signature=3f&part=2", "https://h/a.tar?X-Amz-Credential=…&X-Amz-Signature=…&part=2"),
        ("https://h/a?auth=3f&b=1&jwt=3f&passwd=3f&hdnea=3f~4", "https://h/a?auth=…&b=1&jwt=…&passwd=…&hdnea=…"),
        ("https://h/a?X-Goog-Algorithm=G&X-Goog-Signature=3f'", "https://h/a?X-Goog-Algorithm=…&X-Goog-Signature=…'"),
        ("https://h/a?sv=2024&sp=r&sig=a%2Bb%3D", "https://h/a?sv=2024&sp=r&sig=…"),
        ("https://h/a?AWSAccessKeyId=K&Signature=s&Expires=1", "https://h/a?AWSAccessKeyId=…&Signature=…&Expires=1"),
        ('{"u": "https://h/a?x=1\\u0026access_token=t"}', '{"u": "https://h/a?x=1\\u0026access_token=…"}'),
        ("s3://key:secret@bucket/a", "s3://…@bucket/a"),
        ("GET /?u=https%3A%2F%2Fh%3Fsig%3D3f%26b%3D1&c=2", "GET /?u=https%3A%2F%2Fh%3Fsig%3D…%26b%3D1&c=2"),
        ("u=https%253A%252F%252Fh%253Fsig%253D3f%2526b%253D1", "u=https%253A%252F%252Fh%253Fsig%253D…%2526b%253D1"),
        ("https://token@host/a", "https://…@host/a"),
        ("abfss://box@account.dfs/a, hf://datasets/a@b?config=c", "abfss://box@account.dfs/a, hf://datasets/a@b?config=c"),
    ],
)  # fmt: skip
def test_secrets_of_urls_are_in_no_error_and_no_log(url: str, shown: str, caplog: pytest.LogCaptureFixture) -> None:
    for kind in (ConfigError, DataError, StorageError, ObjectChangedError):
        error = kind(url)
        assert str(error).startswith(shown)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    logging.getLogger("lmms_stream").warning("reads %s", url)
    assert caplog.messages == [f"reads {shown}"]
