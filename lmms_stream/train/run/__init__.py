"""Settings, processes and schedule of a run.

settings        the section `train` of a run's YAML file, checked
distributed     processes: joining, network interface, end, NCCL's flight recorder
mesh            groups of ranks sharing a copy of the model, the tokens of a pack, a matrix
precision       number formats
copies          copies of saved tensors on the CPU, and the writers that wait for the copies
phases          current activity of a rank
flow            actions due after a step, an epoch, a time
callbacks       callbacks of transformers
counts          progress of a run; whether steps train on anything; values of a step agreed by ranks, and values read
                from the device by the host
optimizers      optimizers by name, groups of parameters, Muon, adopted optimizers, the average of weights, clipping
schedules       the learning rate
"""
