"""Batches -> steps -> checkpoints, with FSDP2. `torchrun … -m lmms_stream.train` runs it.

run/            how a run trains, its processes, its schedule
model/          a transformers model as it is run on packs
checkpoint/     what is saved and resumed
report/         what a run tells
habits/         what users of transformers and TRL give -> what a run needs
run_config      a run as one YAML file
evaluate        the loss on a dataset that is not trained on
trainer         FSDP2SFTTrainer: the loop
launch          the command that starts a run; torchrun: of several ranks, which it tells to stop
"""
