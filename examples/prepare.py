"""A small chat corpus (the asyncio package's functions and classes) and a tokenizer, to try things on.

python examples/prepare.py FOLDER writes FOLDER/functions.jsonl, FOLDER/classes.parquet and FOLDER/tokenizer.
"""

import sys
import sysconfig
from pathlib import Path

from lmms_stream.tools.demo.corpus import build_corpus, train_tokenizer

folder = Path(sys.argv[1])
corpus = build_corpus(folder, library=Path(sysconfig.get_paths()["stdlib"]) / "asyncio")
train_tokenizer(corpus.texts, folder / "tokenizer")
sys.stdout.write(f"{corpus.num_functions} functions, {corpus.num_classes} classes in {folder}\n")
