"""Pictures that installed packages ship, with their names as what there is to learn."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

from ..errors import DataError

PACKAGES = ("matplotlib", "sklearn", "skimage", "gradio", "bokeh")
ENDINGS = {".png", ".jpg", ".jpeg", ".webp"}
MOST_PICTURES = 60
MOST_BYTES = 2_000_000


def write_pictures(folder: Path) -> tuple[Path, int]:
    """A JSON-lines file of chats, the pictures that they name, copied beside it, and their number."""
    folder.mkdir(parents=True, exist_ok=True)
    found = [path for name in PACKAGES for path in _pictures_of(name)][:MOST_PICTURES]
    if not found:
        raise DataError(f"none of {', '.join(PACKAGES)} has pictures here: pip install matplotlib, which ships some")
    rows = []
    for number, path in enumerate(found):
        name = f"{number:02}-{path.name}"
        shutil.copyfile(path, folder / name)
        words = path.stem.replace("_", " ").replace("-", " ")
        question = {"role": "user", "content": "What is this picture called?<image>"}
        rows.append({"messages": [question, {"role": "assistant", "content": words}], "images": [name]})
    listed = folder / "pictures.jsonl"
    listed.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return listed, len(rows)


def _pictures_of(package: str) -> list[Path]:
    """Its pictures, by path; none of a package that is not installed. It is not imported."""
    spec = find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    paths = (path for folder in folders for path in sorted(Path(folder).rglob("*")) if path.suffix.lower() in ENDINGS)
    return [path for path in paths if "test" not in str(path) and path.stat().st_size <= MOST_BYTES]
