"""A run's state -> checkpoints, whole or absent, that any world size resumes.

resume          the checkpoint that a run resumes from, chosen once
saving          what a run saves and resumes; the fingerprint of the run
checkpoint      checkpoints saved while training continues
store           places and names of checkpoints, and when one is whole
tensors         tensors of model and optimizer <-> files of torch.distributed.checkpoint
choice          weights of a checkpoint, or their average; its model without weights
export          a checkpoint -> a folder that from_pretrained loads; weight_files: its weights, a few at a time;
                configs: its configs
plain_export    a model that is not transformers' -> a folder
folder          the present model -> such a folder, by all ranks
export_adapter  its adapter -> a folder that peft loads, or the merged model, a few tensors at a time
"""
