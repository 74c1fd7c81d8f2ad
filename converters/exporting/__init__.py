"""Stored datasets -> files of rows: Parquet, JSON lines, WebDataset. Converting the files gives the same samples.

row_files   values and rows -> a file of each format, with media inside or next to it
export      the dataset, each shard into a file of its own; the command that converts the files back
"""
