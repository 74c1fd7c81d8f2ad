"""Lengths of samples -> the packs of each step and rank. Pure: values in, values out; no files, no clocks, no torch.

lengths         tokens of every sample
order           the shuffled sequence of an epoch, a block at a time
shares, sample_order    how many samples of each stream an epoch takes, and their order without packs
mosaic_order    the same in MosaicML's orders, with its batches; mosaic_shuffles: their shuffles
packing         lengths in that order -> packs; kernels/: its compiled loops
pack_range      consecutive packs as arrays
block_packs     the packs of a shuffle block, a stretch at a time; block_counts: how many there are
fixed_packs     packs of the first epoch in the order of another
epoch_plan      the packs of an epoch by their numbers, and of a sample
short_epochs    epochs of few samples, many at a time
pack_plan       the numbered packs of an epoch, any of them at once
measured_block, lane_state, lanes   the same where lengths are measured on the way
next_use        when each shard is needed next
weights         shares of several sources along a run
source_ranges   packs of several sources and epochs
source_turns    sources in turn, as arrays
mixture         several plans and weights -> the packs of each step
assign          the packs of a step -> ranks, by cost
cursor, lane_cursor     where training stands
horizon         how far ahead the packs that a source has left can lie
left_out        samples that a run leaves out, whose segments are padding
ledger          what was in a step, and where a sample was or will be
planner, lane_planner   cursor -> (work of this rank, cursor after it)
ahead           how far workers are ahead of the step at hand
"""
