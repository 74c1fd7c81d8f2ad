"""Source of a file -> places of faults: ten operators, each a function of a syntax node."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

FLIPPED = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
BOUNDS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
FENCES = {"synchronize", "wait", "wait_event", "wait_stream", "join", "barrier", "acquire", "record", "result"}
FLUSHES = {"flush", "fsync", "sync", "close", "commit", "drain", "finish", "sync_folder"}
FORGETTING = {"cache_clear", "clear", "pop", "popitem", "discard", "remove", "invalidate", "forget", "evict"}
GENERATORS = {"default_rng", "SeedSequence", "Generator", "Philox", "PCG64", "manual_seed", "Random", "seed"}
ABOUT_TYPES = {"isinstance", "issubclass", "cast", "getattr", "setattr", "hasattr", "TypeVar", "NewType", "NamedTuple"}
CHECKSUM = re.compile(r"checksum|digest|hash|xxh|crc|md5|sha\d|fingerprint", re.IGNORECASE)


class Edit(NamedTuple):
    """The bytes [start, end) of a source become `text`. probe: the expression or statement that runs there."""

    start: int
    end: int
    text: str
    probe: tuple[int, int, bool] | None  # start, end; True: an expression


class Place(NamedTuple):
    """An edit by an operator, in a function (dotted name)."""

    operator: str
    function: str
    edit: Edit


class Source:
    """A parsed file, with byte offsets and parents of its nodes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.tree = ast.parse(data)
        self.line_starts = [0]
        for line in data.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self.line_starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.line_starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr | ast.stmt) -> str:
        return self.data[self.start(node) : self.end(node)].decode()

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def expression(self, node: ast.expr, text: str) -> Edit:
        """Return the edit that writes `text` for an expression."""
        start, end = self.start(node), self.end(node)
        return Edit(start, end, text, (start, end, True))

    def no_statement(self, node: ast.stmt) -> Edit:
        start, end = self.start(node), self.end(node)
        return Edit(start, end, "pass", (start, end, False))


def flipped_comparison(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = source.text(node.left), source.text(node.comparators[0])
        yield source.expression(node, f"({left}) {FLIPPED[type(node.ops[0])]} ({right})")


def off_by_one(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        if isinstance(node.right, ast.Constant) and node.right.value == 1:
            yield source.expression(node, f"({source.text(node.left)})")
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in BOUNDS:
        left, right = source.text(node.left), source.text(node.comparators[0])
        yield source.expression(node, f"({left}) {BOUNDS[type(node.ops[0])]} ({right})")


def dropped_fence(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Expr) and _called(node.value) in FENCES:
        yield source.no_statement(node)
    elif isinstance(node, ast.With) and len(node.items) == 1 and node.items[0].optional_vars is None:
        lock = node.items[0].context_expr
        if "lock" in source.text(lock).lower():
            start, end = source.start(lock), source.end(lock)
            yield Edit(source.start(node), end, "if True", (start, end, True))


def wrong_seed_word(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Call) and _called(node) in GENERATORS and node.args:
        words = node.args[0]
        yield source.expression(words.elts[-1] if isinstance(words, ast.List) and words.elts else words, "0")
    elif isinstance(node, ast.keyword) and node.arg == "seed" and not isinstance(node.value, ast.Constant):
        yield source.expression(node.value, "0")
    elif isinstance(node, ast.List | ast.Tuple) and isinstance(node.ctx, ast.Load):
        names = [source.text(word) for word in node.elts if isinstance(word, ast.Name | ast.Attribute)]
        if any(name == "seed" or name.endswith(".seed") for name in names):
            yield source.expression(node.elts[-1], "0")


def unchecked_checksum(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.If) and CHECKSUM.search(source.text(node.test)):
        yield source.expression(node.test, "False")


def lost_flush(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Expr) and _called(node.value) in FLUSHES:
        yield source.no_statement(node)


def swapped_arguments(source: Source, node: ast.AST) -> Iterator[Edit]:
    if not isinstance(node, ast.Call) or _called(node) in ABOUT_TYPES:
        return
    values = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg)]
    for first, second in pairwise(values):
        simple = all(isinstance(value, ast.Name | ast.Attribute | ast.Subscript) for value in (first, second))
        if simple and (names := (source.text(first), source.text(second)))[0] != names[1]:
            between = source.data[source.end(first) : source.start(second)].decode()
            text = names[1] + between + names[0]
            probe = source.start(node), source.end(node), True
            yield Edit(source.start(first), source.end(second), text, probe)
            return


def removed_raise(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Raise) and node.exc is not None:
        yield source.no_statement(node)


def wrong_default(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.FunctionDef):
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None and (text := _other(default)):
                yield Edit(source.start(default), source.end(default), text, _first_statement(source, node))
    elif isinstance(node, ast.AnnAssign) and node.value is not None and (text := _other(node.value)):
        if isinstance(source.parents[node], ast.ClassDef):
            yield Edit(source.start(node.value), source.end(node.value), text, None)
    elif (
        isinstance(node, ast.Call) and _called(node) in ("get", "pop") and len(node.args) == 2 and _other(node.args[1])
    ):
        yield source.expression(node.args[1], _other(node.args[1]))


def stale_cache(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Delete) or (isinstance(node, ast.Expr) and _called(node.value) in FORGETTING):
        yield source.no_statement(node)
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
        empty = source.text(node.value) in ("None", "{}", "[]", "set()")
        if empty and not any(str(getattr(parent, "name", "")).startswith("__") for parent in source.above(node)):
            yield source.no_statement(node)


OPERATORS: dict[str, Callable[[Source, ast.AST], Iterator[Edit]]] = {
    operator.__name__: operator
    for operator in (
        flipped_comparison, off_by_one, dropped_fence, wrong_seed_word, unchecked_checksum, lost_flush,
        swapped_arguments, removed_raise, wrong_default, stale_cache,
    )
}  # fmt: skip


def places(data: bytes) -> Iterator[Place]:
    """Yield the places of a file; a compiled file runs no probes."""
    compiled = b"import cython\n" in data
    source = Source(data)
    for node in ast.walk(source.tree):
        parents = [node, *source.above(node)]
        if any(isinstance(parent, ast.JoinedStr) for parent in parents) or _for_types(source, parents):
            continue  # positions inside f-strings are wrong before Python 3.12
        scope = [parent for parent in reversed(parents) if isinstance(parent, ast.FunctionDef | ast.ClassDef)]
        for name, operator in OPERATORS.items():
            for edit in operator(source, node):
                function = ".".join(parent.name for parent in scope)
                yield Place(name, function, edit._replace(probe=None) if compiled else edit)


def _for_types(source: Source, parents: list[ast.AST]) -> bool:
    """Return whether a node is of an annotation, or for type checkers only."""
    for node, parent in pairwise(parents):
        if node in (getattr(parent, "annotation", None), getattr(parent, "returns", None)):
            return True
        if isinstance(parent, ast.If) and "TYPE_CHECKING" in source.text(parent.test):
            return True
    return False


def _called(node: ast.AST) -> str:
    """Return the last name of a called function, or an empty string."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _other(default: ast.expr) -> str:
    """Return another value than a constant's, as text; an empty string for a constant that has none."""
    value = default.value if isinstance(default, ast.Constant) else None
    if isinstance(value, bool):
        return repr(not value)
    return repr(value + 1) if isinstance(value, int) else repr(value * 2 + 1) if isinstance(value, float) else ""


def _first_statement(source: Source, function: ast.FunctionDef) -> tuple[int, int, bool] | None:
    body = [line for line in function.body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))]
    if not body or body[0].lineno == function.lineno or getattr(body[0], "decorator_list", None):
        return None
    return source.start(body[0]), source.end(body[0]), False
