"""Source -> shards and the lengths of their samples; imported as lmms_stream.converters.

options     the settings of a conversion, checked
columns     the schema and columns of stored rows
identity    everything that the output of a conversion depends on; whether stored samples can be copied;
            entries of a dataset_info.json -> a dataset for each kind of rows
convert     the conversion: read sources, map rows, encode samples, write shards
dropping    a drop list -> rows of the sources to leave out
part        one part of a conversion that several machines share
append      add new sources to an existing dataset
repeats     rows that a dataset has already
dry_run     what a conversion would make of the first rows, without writing
report      progress and result
weighted    a list whose entries have weights -> a dataset for each, and the weights of a run
sources/    what the user names -> units of rows
rows/       row -> sample
writing/    samples -> shards, atomically, restartably
exporting/  existing datasets -> files of rows
stored/     existing datasets: measure, verify, merge, show
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
