"""How a run trains, and what it runs on.

settings        the section `train` of a run's YAML file, checked
precision       the number formats that it computes in
distributed     its processes: their group, their mesh, and how they end together
flow            what is due after a step and an epoch; callbacks: those of transformers, which may change it
reading         what the host reads of the device, once a step
counts          how far it is
optimizers      its optimizer by name, and groups of parameters; muon: that for matrices; adopted: one that was given
average         of its weights
schedules       the learning rate along it
"""
