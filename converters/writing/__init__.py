"""Samples -> shards, atomically; what was written before a kill is used again.

reading         the units of all sources, with what maps their rows
column_encoders     values -> bytes of columns
encoding        sample -> bytes of an MDS shard, as MDSWriter makes them
row_counts      how many rows are left out, by why
dropped_rows    rows that a drop list leaves out, and whether they are there
shares          which units each part of a conversion encodes
encoded_units   a unit of rows -> its samples as bytes
unit_files      the files of the work folder that hold them, and say what they are
encoded_parts   units that parts have encoded, below the target
parts           the work of a part, and of making the units of all parts into shards
laid            samples and where their bytes lie; documents: laid end to end and cut into samples
layout          units in the order of the sources -> samples in the order of the outputs
outputs         which samples each shard holds
shards          samples -> a shard, checked, compressed and uploaded
done            whether the same was converted before
replacing       what of an earlier dataset stays until the new one is whole
work            what a conversion keeps between its runs
run             all of it, task by task
carried         what is known of the samples of stored datasets: lengths, rows of sources
commit          what makes shards a dataset, written last
"""
