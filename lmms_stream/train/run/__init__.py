"""What is asked of a training run, and what it runs on.

settings        its sections of a YAML file, checked
distributed     its processes: their group, their mesh, and how they end together
schedules       the learning rate along it
"""
