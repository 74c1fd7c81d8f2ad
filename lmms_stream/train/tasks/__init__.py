"""Batches and a model -> sums of losses over sums of units, by objective. Other losses are in plugins/tasks.

task        interface of tasks, random draws of a task for a sample; batches copied to the device ahead
causal      causal language modelling, of text or of media and text; loss functions in the form of transformers
preference  base of tasks with compared answers; the packs of a step, run twice
reference   the starting weights of a run, and their log-probabilities of answers
registry    tasks by name; a processor may name the task of its dataset
steps       a task on the packs of a step: gradients of the objectives, and sums of losses by source
"""
