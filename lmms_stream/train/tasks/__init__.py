"""Batches and a model -> sums of losses over sums of units, by objective: one file for each kind of training.

task     what a task is
noise    what a task draws at random for a sample
causal   causal language modelling, of text or of media and text: the task of a run that names no other; dft: the same,
         each token weighted by its probability
masked_diffusion  masked tokens are predicted from all of their sample, in both directions
images   what tasks on images share; latents: images <-> what a frozen autoencoder makes of them
flow_matching   a model learns the way from noise to an image; sampling: that model -> images
reconstruction  a decoder learns to make the image of what a frozen encoder makes of it; encoder: that; terms: by which
                losses it learns
bagel_draw      noise, times and what is dropped of texts and images in one sequence; bagel_model: what learns them;
                bagel_check: the proof that it keeps to the mask; bagel: the task, of tokens and of latents
preference what tasks that compare answers share: pairs (dpo) and answers by themselves (kto); mismatched: answers
         behind other prompts; passes: the packs of a step, which they run twice
function a loss function as transformers' users write it
registry the tasks by their names, of which a dataset's processor may name one
copies   batches on the device, copied ahead
steps    a task on the packs of a step: gradients of its objectives, and their sums by source
"""
