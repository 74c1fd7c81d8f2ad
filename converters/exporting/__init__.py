"""Stored datasets -> files of rows: Parquet, JSON lines, WebDataset. Converting the files gives the same samples.

export      the dataset, each shard into a file with media inside or next to it; the command that converts back
"""
