"""MDS datasets: shards -> samples by number.

decoding    bytes of columns -> values; compressions
index       what index.json says of the shards
index_stream    a long JSON file, member by member
shard_list      the shards of a dataset, as entries and as arrays; shard_table: long lists, from files of the node
shard_numbers   the numbers of shards by the names of their files
stored_index    the index of a stored dataset, in memory or from a table
shard       one shard, memory-mapped
shard_files     shards as files on this node
growth      a dataset that has grown, as it was before
lengths     the lengths index
provenance      which row of which source each sample was made of
listing     the small files that say what a dataset is
listed_samples  the lines of a list of samples, as drop lists have them
measuring       shards -> the lengths of their samples, in many processes; shard_lengths: of one of them
stored_lengths  where a lengths index is kept
pack_counts     pack counts of plans, kept on this node
reader      samples by number, from shards fetched when they are needed
streams     one stored dataset: index, lengths index, cache folder; filled_folder: what makes that one a dataset, too
peers       nodes that give each other shards
auto        the lengths index of a dataset that has none, measured once for all ranks
core        PackedDataset: streams, samples and packs, for loaders and commands
dataset_config      the same as a section of a YAML file; engine_fields: its fields that describe sources
epochs      which epoch an iteration is; epoch_work: its samples by MosaicML's arithmetic
hooked_streams      MosaicML's streams of classes that fetch in their own way, as a store
equal_world     nodes of equally many ranks, as those orders count them
mosaic_bases        what our classes need of MosaicML's streams and loaders, and its package where it is imported
mosaic_streams      MosaicML's streams as ours; mosaic_settings: its keywords, checked
mosaic      StreamingDataset: MosaicML's class over the core; mosaic_loader: its DataLoader; mosaic_shards: its shards
packed      PackedStreamingDataset: StreamingDataset with our order and packs
"""
