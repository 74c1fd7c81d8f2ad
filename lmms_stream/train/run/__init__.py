"""How a run trains, and what it runs on.

settings        the section `train` of a run's YAML file, checked
distributed     its processes: their group, and how they end together
joining         how they come together
interface       over which network interface they reach those of other nodes
peers           where they take shards from each other's nodes
mesh            which of them share a copy of the model, the tokens of a pack, a matrix
precision       the number formats that it computes in
flight_recorder what NCCL did when a collective timed out
phases          what a rank is doing
flow            what is due after a step and an epoch; clock: a checkpoint, by time
callbacks       those of transformers, which may change it
reading         what the host reads of the device, once a step
counts          how far it is; trained_on: whether its steps train on anything
clipping        the norm of its gradients
optimizers      its optimizer by name, and groups of parameters; muon: that for matrices; adopted: one that was given
average         of its weights
schedules       the learning rate along it
"""
