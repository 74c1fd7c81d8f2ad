"""A run's state -> checkpoints, whole or absent, that any world size resumes.

resume          the checkpoint that a run resumes from, chosen once
saving          what a run saves and resumes; the fingerprint of the run
checkpoint      checkpoints saved while training continues
store           places and names of checkpoints, and when one is whole
tensors         tensors of model and optimizer <-> files of torch.distributed.checkpoint
export          a checkpoint, or the present model -> a folder that from_pretrained loads
weight_files    its configs, and its weights or their average, a few tensors at a time
export_adapter  an adapter -> a folder that peft loads, or the merged model, a few tensors at a time
"""
