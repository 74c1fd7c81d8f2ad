"""Source -> shards, with the lengths of their samples; imported as lmms_stream.converters.

options     what is asked of a conversion, checked
convert     the conversion: sources are read, mapped, encoded and laid into shards
columns     what is stored of rows: its schema and columns
asked       all that decides what is written, by which a conversion is known again
again       whether stored samples are stored again as they are
dropping    a drop list -> rows of the sources that are left out
part        one part of a conversion that several machines do
append      new sources beside those of a dataset that is there
beginnings  the first units of sources, for a dry run
dry_run     what a conversion would make of the first rows, without writing
report      how far it is, and what it did
described   dataset_info.json#* -> its datasets that can be read, by the kind of their rows
weighted    a list whose entries have weights -> a dataset for each, and the weights of a run
sources/    what the user names -> units of rows
rows/       row -> sample
media/      references in rows -> bytes of images, audio and video
writing/    samples -> shards, atomically, restartably
engines/    what does the work: processes, or workers on a Ray cluster
exporting/  datasets that are there -> files of rows
stored/     datasets that are there: measured, verified, merged, looked at
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .options import ConvertOptions as ConvertOptions
    from .report import ConvertReport as ConvertReport
    from .rows.options import SchemaOptions as SchemaOptions

_HOME = {"ConvertOptions": "options", "ConvertReport": "report", "SchemaOptions": "rows.options"}

__all__ = ["ConvertOptions", "ConvertReport", "SchemaOptions"]

__getattr__, __dir__ = lazy_names(__name__, _HOME)
