"""Batches and a model -> sums of losses over sums of units, by objective. Other losses are in plugins/tasks.

task        what a task is, and what it draws at random for a sample; batches that are copied to the device ahead
causal      causal language modelling, of text or of media and text; loss functions as users of transformers write them
preference  what losses of compared answers share: the packs of a step, which run twice
reference   the starting weights of a run, and the log-probabilities that they give to answers
registry    tasks by name; a processor may name the task of its dataset
steps       a task on the packs of a step: gradients of its objectives, and their sums by source
"""
