"""Batches and a model -> sums of losses over sums of units, by objective: one file for each kind of training."""
