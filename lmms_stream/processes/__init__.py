"""Worker processes of this machine: tasks in, results out.

pool        worker processes, tasks and results; check for values to send to a worker
engine      the choice of a task executor: processes, threads, or an engine of plugins/engines
own_code    code of the user, by a name for each process
fork_server a process with the workers' modules imported, forked for each worker; preloaded: its first imports;
            check for scripts without a main guard
interpreter     one call in a new interpreter
bar         a progress bar
shared_tensors  tensors in shared memory without a name
family      child processes, and their end
"""
