"""Relax's data layer.

data                Dataset
streaming_dataset   StreamingDataset, its readers, buffer and cursor
data_utils          rows of files, a row's messages and sample, lengths of samples
processing_utils    tokenizers and processors of transformers
"""
