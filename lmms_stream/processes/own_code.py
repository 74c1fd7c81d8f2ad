"""The user's own code, by a name for any process: "module:name" or "path/to/file.py:name".

Modules are searched in the installed packages, then in the current folder; a file can import modules next to the file.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Callable
from functools import reduce
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from ..errors import ConfigError

_LIBRARIES = ("lmms_stream", "torch", "typing", "builtins", "collections", "abc")  # modules of a class's bases


def own_code(name: str, *, setting: str, what: str) -> tuple[ModuleType, Any]:
    """Return the module, and the callable class or function with the given name.

    setting: setting or option of the name, for errors. what: "Class" or "function". ConfigError for an unknown name,
    and for failed imports.
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
    """Hash of the module's source file, and of the file with the value's definition if different.

    Imported files are not included. asked: the setting and its value, for the ConfigError of a missing file.
    """
    digest = hashlib.blake2b(digest_size=16)
    home = sys.modules.get(getattr(value, "__module__", None) or "", module)
    for each in dict.fromkeys((module, home)):
        path = getattr(each, "__file__", None)
        if not path or not str(path).endswith(".py"):
            raise ConfigError(
                f"{asked}: {each.__name__} has no source file, so its changes would not be detected: write your own "
                "function that calls it"
            )
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()


def class_source(kind: type, *, asked: str) -> str:
    """Return the source code of a class and its own bases, and of what they name in their modules.

    Imported files are not included. asked: name of the class for the ConfigError of missing source code.
    """
    texts: dict[Any, str] = {}
    waiting: list[Any] = [each for each in kind.__mro__ if each.__module__.partition(".")[0] not in _LIBRARIES]
    for each in waiting:
        if each in texts:
            continue
        try:
            texts[each] = inspect.getsource(each)
        except (OSError, TypeError) as error:
            raise ConfigError(
                f"{asked} has no source file, so its changes would not be detected: write the class to a file"
            ) from error
        known = vars(sys.modules[each.__module__])
        for name in sorted(known.keys() & {*re.findall(r"\w+", texts[each])}):
            if isinstance(known[name], str | int | float | tuple):
                texts[each] += f"{name} = {known[name]!r}"
            elif isinstance(known[name], type | FunctionType) and known[name].__module__ == each.__module__:
                waiting.append(known[name])
    return "".join(texts.values())


def name_of(function: Callable[..., Any], *, setting: str) -> str:
    """Name of a function for other processes; for a function of the running script, the name has the script's file.

    ConfigError for lambdas, inner functions, objects and functions of a notebook: other processes cannot load these.
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
                "write it to a file, and import it"
            )
        module = str(Path(script).absolute())
    name = f"{module}:{qualified}"
    if own_code(name, setting=setting, what="function")[1] is not function:
        raise ConfigError(
            f"{setting}={function!r}: {name} is another object: pass an object that the module itself defines"
        )
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
    """Return the module of a file, executed once per content; the running script is not executed again."""
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
