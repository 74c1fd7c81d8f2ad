"""Samples -> shards, atomically; a restart uses what was written before.

reading         units of all sources with their mappers; shares: the units of each part of a conversion
encoding        sample -> bytes of an MDS shard, equal to MDSWriter's
dropped_rows    rows of a drop list
encoded_units   a unit of rows -> its samples as bytes
unit_files      files of encoded units in the work folder; places of the bytes of samples
parts           the units of a part, encoded below the target; the units of all parts -> shards
documents       documents joined and cut into samples
placement       units in the order of the sources -> samples of each output, without duplicates
shards          samples of an output -> full shards -> their files, compressed and uploaded
work            state between runs of a conversion; whether it is done; the earlier dataset until the new one is whole
run             the conversion, task by task
commit          the last write: shards become a dataset
mosaic_writers  MosaicML's writers, by their names
"""
