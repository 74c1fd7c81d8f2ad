"""A run's state -> checkpoints, whole or absent, that any world size resumes.

resume          the checkpoint a run resumes from, chosen once
saving          state that a run saves and resumes; the fingerprint of the run
checkpoint      checkpoints saved while training continues
store           places, names and completeness of checkpoints
tensors         tensors of model and optimizer <-> files of torch.distributed.checkpoint
export          a checkpoint, or the present model -> a folder that from_pretrained loads
weight_files    its configs, and its weights or their average, a few tensors at a time
export_adapter  an adapter -> a folder that peft loads, or the merged model, a few tensors at a time
"""
