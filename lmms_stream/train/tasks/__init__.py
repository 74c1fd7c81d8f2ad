"""Batches and a model -> sums of losses over sums of units, by objective: one file for each kind of training.

task     what a task is
noise    what a task draws at random for a sample
causal   causal language modelling, of text or of media and text: the task of a run that names no other; dft: the same,
         each token weighted by its probability
masked_diffusion  masked tokens are predicted from all of their sample, in both directions
images   what tasks on images share
flow_matching   a model learns the way from noise to an image, or to its latents; sampling: that model -> images
reconstruction  a decoder learns to make the image of what a frozen encoder makes of it;
bagel_model     noise, times and drops of texts and images in one sequence, and the model that learns them;
                bagel: the task, of tokens and of latents, and the proof of its mask
preference what tasks that compare answers share: pairs (dpo) and single answers (kto); the packs of a step,
         which run twice
function a loss function as transformers' users write it
registry the tasks by their names, of which a dataset's processor may name one
copies   batches on the device, copied ahead
steps    a task on the packs of a step: gradients of its objectives, and their sums by source
"""
