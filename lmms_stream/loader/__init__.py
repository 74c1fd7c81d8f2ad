"""Cursor -> the batches of this rank, made by loader workers. The planner (plan/) decides the work of each step.

worker          a worker: work -> ready batches, with shards fetched, samples measured and counts kept
blocks_ahead    shards to fetch ahead, and shards that a limited cache may evict
batch_maker     the batch of a pack: processed samples, pieces of samples, padding for left-out samples
collate         samples -> batch: media, token inputs, sequences; several packs -> one batch for a plain DataLoader
media_memory    memory for media and rows
counts          counts of fetched files and of packs, in memory that workers share
wire            batches on their way to the loader
workers         worker processes: start, end
worker_server   a process for forking workers
delivery        position of a loader
bad_samples     errors of a single sample; overdue samples
drop_list       lists of samples on disk: to drop, left out
agreement       values that ranks must agree on
loader          PackedLoader; settings that decide its packs, for a checkpoint
"""
