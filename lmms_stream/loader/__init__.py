"""Cursor -> this rank's batches, made by loader workers. The planner (plan/) says what is to be done in each step.

worker          what a worker does: planned -> ready, with the shards fetched
blocks_ahead    which shards a worker fetches ahead; cache_outlook: which a limited cache lets go of
measuring       the tokens of samples, measured as lanes pass them
batch_maker     the batch of a pack
segment         a sample of a pack, processed, or the piece of it that the pack holds
collate         samples -> batch; media_inputs: of their media; token_inputs: of their tokens besides ids; sequences: of
                samples that have several; row_memory, media_memory: the memory that it lies in
pack_collator   several packs of a dataset -> one batch, for a plain DataLoader
wire            batches on their way to the loader
workers         worker processes; worker_start: that all run; worker_counts: what they fetched; worker_end: how they end
worker_server   a process that workers are forked from
delivery        where a loader stands
bad_samples     which errors are of one sample; left_out_list, drop_list: lists on disk; masked_packs: packs without
sample_clock    how long a worker is at a sample
loader          PackedLoader
stretches       what decides its packs from a step on, for a checkpoint
"""
