"""How a run trains, and what it runs on.

settings        the section `train` of a run's YAML file, checked
distributed     its processes: their group, their mesh, and how they end together
optimizers      its optimizer by name, and groups of parameters; muon: that for matrices
schedules       the learning rate along it
"""
