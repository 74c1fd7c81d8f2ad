"""MDS datasets: shards -> samples by number.

decoding    bytes of columns -> values; compressions
index       index.json and its shards; small files that describe a dataset
shard_list      shards of a dataset, as entries and as arrays; a dataset before growth; numbers of shards by file name
shard_table     long lists of shards, in files of the node; a long JSON file, member by member
stored_index    the index of a stored dataset, in memory or from a table
shard       a memory-mapped shard; shards as files of this node
lengths     the lengths index
provenance      source row of each sample; lines of a list of samples, for example a drop list
measuring       shards -> lengths of their samples, in many processes; location of a lengths index
reader      samples by number, from shards fetched on demand
streams     a stored dataset: index, lengths index, cache folder; filled_folder: a folder filled from a remote dataset
auto        the missing lengths index of a dataset, measured once for all ranks
core        PackedDataset: streams, samples and packs, for loaders and commands
dataset_config      PackedDataset as a section of a YAML file; LMMS Engine's fields for sources
epochs      the epoch of an iteration, and its samples by MosaicML's arithmetic, with equal numbers of ranks
hooked_streams      MosaicML's streams with their own download method, as a store
mosaic_streams      MosaicML's streams as ours; parts of MosaicML's package and loaders for our classes
mosaic_shards       MosaicML's shards and LocalDataset
mosaic      StreamingDataset: MosaicML's class over the core, with its keywords and DataLoader
packed      PackedStreamingDataset: StreamingDataset with our order and packs
"""
