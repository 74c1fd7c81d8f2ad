"""MDS datasets: shards -> samples by number.

shard       what index.json lists; one shard, memory-mapped
decoding    bytes of columns -> values; compressions
lengths     the lengths index
reader      samples by number, from shards fetched when they are needed
streams     one stored dataset: index, lengths index, cache folder
epochs      which epoch an iteration is
dataset     PackedStreamingDataset
dataset_config      the same as a section of a YAML file
"""
