"""A run's state -> checkpoints, whole or not there, that any world size resumes.

beginning       before a model is built: whether a checkpoint will fill it
saving          what a run saves and resumes
fingerprint     what a checkpoint says of the run that wrote it
checkpoint      saved while training goes on
store           where checkpoints lie, and when one is whole; paths: how they are named
tensors         tensors of model and optimizer <-> files of torch.distributed.checkpoint
choice          its weights, or their average; names: what exports are called and made of
empty           its model without weights
export          a checkpoint -> a folder that from_pretrained loads; weight_files: its weights, a few at a time;
                configs: its configs
plain_export    a model that is not transformers' -> a folder
folder          the model as it is now -> such a folder, by all ranks
export_adapter  its adapter -> a folder that peft loads, or the model with it; merge: a few tensors of that at a time
"""
