"""Functions of arrays and numbers; the C files name the arguments and results of each."""

from collections.abc import Callable
from typing import Any

def __getattr__(name: str) -> Callable[..., Any]: ...
