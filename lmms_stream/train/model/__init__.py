"""A transformers model -> what each rank runs on packs.

model       how one is built, and how it is run on packs
loss        a loss of each token that is learnt
attention   attention inside samples only: which, and the proof; varlen: each sample by itself
sharding    what each rank holds; weights: how it gets there
flops       how much arithmetic its training takes
"""
