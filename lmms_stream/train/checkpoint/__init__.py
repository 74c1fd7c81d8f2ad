"""A run's state -> checkpoints, whole or absent, for resuming at any world size.

resume          the checkpoint a run resumes from, chosen once
saving          saving and resuming the state of a run; the fingerprint of the run
checkpoint      checkpoints saved while training continues
store           places, names and completeness of checkpoints
tensors         tensors of model and optimizer <-> files of torch.distributed.checkpoint
export          a checkpoint, or the current model -> a folder for from_pretrained
weight_files    configs, and weights or their average, a few tensors at a time
export_adapter  an adapter -> a folder for peft, or the merged model, a few tensors at a time
"""
