"""Names that files have while they are written, and what killed processes left under such names."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from pathlib import Path

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.\d+-\d+\.tmp")


def temporary_name(path: Path) -> Path:
    """A hidden name beside `path`, nobody else's, for what is to become that file.

    Processes of two nodes that share a folder may have the same number, as containers begin to count anew.
    """
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.randbits(64)}.tmp")


def folder_beside(path: Path) -> Path:
    """The name of a folder, on the same disk, for what is to become the temporary file `path`."""
    return path.with_name(
        re.sub(r"(\d+)\.tmp$", r"0\1.tmp", path.name) if path.suffix == ".tmp" else f"{path.name}.tmp"
    )


def give_name(temporary: Path, path: Path) -> None:
    """Rename a temporary file to `path`; FileExistsError if another file has that name, which stays."""
    try:
        os.link(temporary, path)
    except OSError as error:  # also of a file system without hard links, and of a link that leads to no file
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        temporary.replace(path)
    else:
        temporary.unlink()


def leftovers(folder: Path) -> dict[Path, list[Path]]:
    """Temporary files and folders in a folder, by the file that each was to become."""
    found: dict[Path, list[Path]] = {}
    for entry in os.scandir(folder) if folder.is_dir() else ():
        leftover = _LEFTOVER.fullmatch(entry.name)
        if leftover:
            found.setdefault(folder / leftover["name"], []).append(Path(entry.path))
    return found


def remove_leftovers(path: Path) -> None:
    """Temporary files of downloads of `path` that no process works on any more: the caller holds its lock."""
    for leftover in leftovers(path.parent).get(path, []):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)
