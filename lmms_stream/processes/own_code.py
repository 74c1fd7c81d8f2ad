"""Code of the user's own, by a name that any process can load: "module:name" or "path/to/file.py:name".

A module is also looked for in the current folder, behind all that is installed; a file may import what lies beside it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from functools import reduce
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ConfigError


def own_code(name: str, *, setting: str, what: str) -> tuple[ModuleType, Any]:
    """The module, and the class or function in it that can be called by this name.

    setting: what the name was given as, for errors. what: "Class" or "function". ConfigError for a name that leads to
    nothing, and for code that cannot be imported.
    """
    where, colon, attribute = name.rpartition(":")
    if not (where and colon and attribute):
        raise ConfigError(
            f"{setting} {name!r} names no {what.lower()}: write it as module:{what} or path/to/file.py:{what}"
        )
    module = (
        _of_file(Path(where), f"{setting} {name}") if where.endswith(".py") else _module(where, name, setting, what)
    )
    try:
        found: Any = reduce(getattr, attribute.split("."), module)
    except AttributeError:
        found = None
    if not callable(found):
        raise ConfigError(f"{setting} {name}: {where} has no {what.lower()} {attribute!r}: correct the name")
    return module, found


def source_hash(module: ModuleType, value: Any, *, asked: str) -> str:
    """A hash of the module's source file, and of the file in which the value was defined where that is another.

    What these import is not in it. asked: the setting and its value, for the ConfigError of a missing file.
    """
    digest = hashlib.blake2b(digest_size=16)
    home = sys.modules.get(getattr(value, "__module__", None) or "", module)
    for each in dict.fromkeys((module, home)):
        path = getattr(each, "__file__", None)
        if not path or not str(path).endswith(".py"):
            raise ConfigError(
                f"{asked}: {each.__name__} has no source file, so that changes of it would not be noticed: write a "
                "function of your own that calls it"
            )
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()


def name_of(function: Callable[..., Any], *, setting: str) -> str:
    """A name by which other processes load a function; one of the script that runs is named by the script's file.

    ConfigError for what no other process could load: a lambda, an inner function, an object, what a notebook holds.
    """
    module, qualified = getattr(function, "__module__", None), getattr(function, "__qualname__", "<object>")
    if module is None or "<" in qualified:
        raise ConfigError(
            f"{setting}={function!r} cannot be loaded by other processes: pass a function that a module defines by "
            "name (no lambda, no inner function, no object)"
        )
    if module == "__main__":
        script = getattr(sys.modules["__main__"], "__file__", None)
        if script is None:
            raise ConfigError(
                f"{setting}={qualified} is a function of a notebook or a prompt, which other processes cannot load: "
                "write it to a file, and import it from there"
            )
        module = str(Path(script).absolute())
    name = f"{module}:{qualified}"
    if own_code(name, setting=setting, what="function")[1] is not function:
        raise ConfigError(f"{setting}={function!r}: {name} is another object: pass what the module itself defines")
    return name


def _module(where: str, name: str, setting: str, what: str) -> ModuleType:
    _look_in(Path.cwd())
    try:
        return import_module(where)
    except ImportError as error:
        raise ConfigError(
            f"{setting} {name}: module {where} cannot be imported ({error}): install it, or name its file as "
            f"path/to/file.py:{what}"
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{setting} {name}: module {where} cannot be imported ({error!r}): correct it") from error


def _of_file(path: Path, asked: str) -> ModuleType:
    """The module that a file makes, once for each content of it; the script that runs is not run again."""
    if not path.is_file():
        raise ConfigError(f"{asked}: there is no file {path.resolve()}: correct the path")
    path = path.resolve()
    main = sys.modules["__main__"]
    if (script := getattr(main, "__file__", None)) and Path(script).resolve() == path:
        return main
    source = path.read_bytes()
    digest = hashlib.blake2b(bytes(path) + b"\0" + source, digest_size=6).hexdigest()
    name = f"lmms_stream_own_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses look their module up
    _look_in(path.parent)
    try:
        # Compiled here: Python's own cache of compiled files takes another content of the same second for the same.
        exec(compile(source, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{asked}: {path} cannot be run ({error!r}): correct it") from error
    return module


def _look_in(folder: Path) -> None:
    if not {str(folder), ""} & set(sys.path):
        sys.path.append(str(folder))
