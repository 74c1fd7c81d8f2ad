"""Build the package with setuptools, and a C compiler: the machine's, or that of the package ziglang."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 (the hooks that compile nothing)

ZIG = "ziglang>=0.13"


def compiler() -> str | None:
    """Return the C compiler of this machine, if it has one: CC, that of Python, or a usual one."""
    names = os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"
    return next((name for name in names if name and shutil.which(name.split()[0])), None)


def requires() -> list[str]:
    """Return the packages that the build needs besides setuptools."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise SystemExit(
            f"{header} does not exist, and compiling lmms-stream needs it: install a wheel of lmms-stream, install the "
            "headers of this Python (Debian and Ubuntu: apt install python3-dev), or use a Python with headers, for "
            "example of uv or conda"
        )
    return [] if compiler() else [ZIG]


def set_compiler() -> None:
    """Let setuptools use a compiler that Python does not name."""
    command = compiler() or f"{sys.executable} -m ziglang cc"
    if command != sysconfig.get_config_var("CC"):
        os.environ["CC"] = command
        os.environ.setdefault("LDSHARED", f"{command} -shared")


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *requires()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *requires()]


def build_wheel(directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    set_compiler()
    return build_meta.build_wheel(directory, config_settings, metadata_directory)


def build_editable(directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    set_compiler()
    return build_meta.build_editable(directory, config_settings, metadata_directory)
