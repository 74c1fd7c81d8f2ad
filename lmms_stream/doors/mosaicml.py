"""Our StreamingDataset, Stream, StreamingDataLoader and PackedStreamingDataset as subclasses of MosaicML's own classes.

`from lmms_stream import StreamingDataset` also gives these classes if `streaming` is imported before. Install its
package with `pip install 'lmms-stream[mosaicml]' && pip install --no-deps mosaicml-streaming`.
"""

from __future__ import annotations

from ..extras import need

need("streaming", by="the classes of lmms_stream.doors.mosaicml")

import streaming  # noqa: E402

from ..mds import mosaic, packed  # noqa: E402
from ..mds.mosaic_streams import OfPaths  # noqa: E402


class Stream(OfPaths, streaming.Stream):
    """See lmms_stream.Stream; a class may override how files are fetched."""


class StreamingDataset(mosaic.StreamingDataset, streaming.StreamingDataset):
    """See lmms_stream.StreamingDataset."""

    Stream = Stream


class StreamingDataLoader(mosaic.StreamingDataLoader, streaming.StreamingDataLoader):
    """See lmms_stream.StreamingDataLoader."""


class PackedStreamingDataset(packed.PackedStreamingDataset, StreamingDataset):
    """See lmms_stream.PackedStreamingDataset."""
