"""A transformers model -> what each rank runs on packs.

attention   which implementations of attention to try; varlen: each sample by itself
loss        a loss of each target token
model       how a model is built, and how it is run on packs
isolation   the proof that it keeps the samples of a pack apart
sharding    what each rank holds; weights: how it gets there
flops       how much arithmetic its training takes
"""
