from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ..processes import ROOT


def test_all_but_other_clouds_works_without_mosaicmls_package(tokenizer: Path, s3_folder: str, tmp_path: Path) -> None:
    """In the interpreter and in the workers that it starts the package and what it needs alone cannot be imported."""
    start = tmp_path / "start"
    start.mkdir()
    missing = ("streaming", "brotli", "catalogue", "oci", "paramiko", "snappy", "zstd")
    (start / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({missing}))\n")
    path = os.pathsep.join([str(start), str(ROOT), os.environ.get("PYTHONPATH", "")])
    code = f"from tests.mds.without_mosaic import *; do_all({str(tokenizer)!r}, Path({str(tmp_path)!r}), {s3_folder!r})"
    command = [sys.executable, "-c", code]  # a module that is run would be imported by each worker of a conversion
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=os.environ | {"PYTHONPATH": path}
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
