"""Cursor -> this rank's batches, made by loader workers.

loader          PackedLoader
delivery        what the cursor becomes when a batch is delivered
worker          which packs are a worker's, and their batches
blocks_ahead    which shards a worker fetches ahead
batch_maker     the batch of a pack; collate: samples -> batch; row_memory: the memory that it lies in
wire            batches on their way to the loader
worker_start    workers that all run; worker_counts: what they fetched; worker_end: how they end
"""
