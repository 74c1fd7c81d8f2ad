"""Lengths of samples -> the packs of each step and rank. Pure: values in, values out; no files, no clocks, no torch.

lengths         lengths of samples, and their hash
order           the shuffled sequence of an epoch, a block at a time; the order of packs that stay the same
sample_order    samples of each stream in an epoch, and their order without packs
mosaic_order    the same in MosaicML's orders, with its batches and shuffles
packing         lengths of samples in that order -> packs, consecutive packs as arrays; kernels/: its compiled loops
block_packs     packs of a shuffle block
epoch_plan      packs of an epoch by number, packs of a sample, numbers of packs
short_epochs    epochs of few samples, many at a time
pack_plan       the numbered packs of an epoch, with random access
lanes           packs where lengths are measured while reading; their planner
next_use        the next use of each shard
source_ranges   packs of several sources and epochs; shares of the sources along a run
turn_taking     several plans and weights -> packs in turn
events          where an epoch, a packing_length or a window of a run ends; the steps of packs
mixture         a cursor -> the packs of its step, and the next cursor
assign          the packs of a step -> ranks, by cost
cursor, lane_cursor     position of training
left_out        samples that a run leaves out; their segments are padding
ledger          the content of a step, and the step of a sample; the packs that a source has left
planner         cursor -> (work of this rank, cursor after it); how far workers are ahead
"""
