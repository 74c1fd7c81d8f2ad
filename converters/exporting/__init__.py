"""Datasets that are stored -> files of rows: Parquet, JSON lines, WebDataset. What is written gives the samples again.

values      values of columns -> what files of a format can hold, and media beside or within them
row_files   rows -> a file of each format
back        the command that converts the files to the same samples
export      the dataset, shard by shard, each into a file of its own
"""
