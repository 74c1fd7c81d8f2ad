"""How a run trains, and what it runs on.

settings        the section `train` of a run's YAML file, checked
distributed     its processes: their group, their mesh, and how they end together
flow            what is due after a step and an epoch; clock: a checkpoint, by time
callbacks       those of transformers, which may change it
counts          how far it is
optimizers      its optimizer by name, and groups of parameters; muon: that for matrices; adopted: one that was given
average         of its weights
schedules       the learning rate along it
"""
