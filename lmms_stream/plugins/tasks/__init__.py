"""Losses other than the loss of causal language models: see train/tasks/registry.py.

dft                 dynamic fine-tuning
masked_diffusion    masked diffusion language models
dpo, kto            preferences
flow_matching       images by flow matching; images from a model
reconstruction      images from their own features
images              shared code of the losses of images
bagel               texts and images in one sequence; bagel_model: its model
"""
