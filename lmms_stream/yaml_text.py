"""YAML and JSON text -> values, and values -> YAML text: one reader for configs, overrides and lists.

Numbers follow YAML 1.2's core schema, which includes JSON's numbers: 1e-5 and 1E3 are numbers, 010 is 10 and 0o17 is
15. Times and dates are text. Beyond 1.2, as programs with PyYAML read them: yes, no, on and off are truth values, 1_000
is 1000 and 0b11 is 3.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from .errors import ConfigError

_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_MERGE = "tag:yaml.org,2002:merge"
_NUMBERS = (
    (_INT, re.compile(r"[-+]?(?:0b[01][01_]*|0o[0-7][0-7_]*|0x[0-9a-fA-F][0-9a-fA-F_]*|[0-9][0-9_]*)$")),
    (
        _FLOAT,
        re.compile(
            r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)$"
            r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
        ),
    ),
)
_FIRST_OF_NUMBERS = list("-+.0123456789")
_NOT_OURS = {_INT, _FLOAT, "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value"}  # rules of YAML 1.1 alone
_MOST_VALUES = 100_000  # that aliases may expand to, in a text that does not hold a tenth of them itself


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the numbers of YAML 1.2, which refuses what `_check_nodes` does."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML declares it
        first: [(tag, pattern) for tag, pattern in rules if tag not in _NOT_OURS]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _check_nodes(node)
        return node


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which quotes texts that either version of YAML takes for a number or a date."""


def _number(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    return int(text, 0 if text.lstrip("-+")[:2] in ("0b", "0o", "0x") else 10)


def _fraction(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node)).replace("_", "").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


for _tag, _pattern in _NUMBERS:
    _Loader.add_implicit_resolver(_tag, _pattern, _FIRST_OF_NUMBERS)
    _Dumper.add_implicit_resolver(_tag, _pattern, _FIRST_OF_NUMBERS)
_Loader.add_constructor(_INT, _number)
_Loader.add_constructor(_FLOAT, _fraction)


def read_yaml(text: str | bytes) -> Any:
    """Return the value that a text holds; ConfigError, whose message is the reason in one line, for other text.

    >>> read_yaml("[1e-5, 1E3, 010, 0o17, 1_000, no, 2026-11-25]")
    [1e-05, 1000.0, 10, 15, 1000, False, '2026-11-25']
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ConfigError("its values are nested too deeply: write fewer levels") from None
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    except (KeyError, AttributeError) as error:  # PyYAML's, of !!bool and !!timestamp with another text
        raise ConfigError("a tag (!!) does not fit its value: leave the tag out") from error


def write_yaml(value: Any, *, sort_keys: bool = False) -> str:
    """Return YAML that read_yaml and readers of YAML 1.1 read as this value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=sort_keys)


def _check_nodes(root: yaml.Node) -> None:
    """ConfigError if an anchor holds itself, if aliases expand a short text to very many values, or for a key that a
    mapping has twice.

    Each alias is the node of its anchor, so that nodes are counted once, and their sizes with all aliases written out.
    """
    sizes: dict[int, int | None] = {}  # of nodes; None: a node whose values are not counted yet
    left: list[yaml.Node] = [root]
    while left:
        node = left[-1]
        parts = _parts(node)
        if sizes.setdefault(id(node), None) is not None:
            left.pop()
            continue
        new = [part for part in parts if id(part) not in sizes]
        if new:
            left += new
            continue
        held = [sizes[id(part)] for part in parts]
        if any(size is None for size in held):
            raise ConfigError("an anchor (&) holds its own alias (*): write the values out")
        sizes[id(node)] = 1 + sum(size or 0 for size in held)
        _check_keys(node)
        left.pop()
    if (sizes[id(root)] or 0) > max(_MOST_VALUES, 10 * len(sizes)):
        raise ConfigError(
            f"its aliases (*) expand {len(sizes)} values to more than {_MOST_VALUES}: write out what is meant"
        )


def _check_keys(node: yaml.Node) -> None:
    """ConfigError for a key that a mapping has twice, of which the first value would be lost."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    keys = [(key.tag, key.value) for key, _ in pairs if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ConfigError(f"a mapping at line {node.start_mark.line + 1} has {twice[1]!r} twice: remove one of them")


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
