"""Source -> shards, with the lengths of their samples; imported as lmms_stream.converters.

options     what is asked of a conversion, checked
convert     the conversion: sources are read, mapped, encoded and laid into shards
report      how far it is, and what it did
weighted    a list whose entries have weights -> a dataset for each, and the weights of a run
sources/    what the user names -> units of rows
rows/       row -> sample
media/      references in rows -> bytes of images, audio and video
writing/    samples -> shards, atomically, restartably
engines/    what does the work: processes, or workers on a Ray cluster
stored/     datasets that are there: measured, verified, merged, looked at
"""
