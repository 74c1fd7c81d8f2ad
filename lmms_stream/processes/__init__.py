"""Worker processes of this machine: tasks in, results out.

pool        the processes, their tasks and results; what can be sent to them
engine      the choice of a task executor: processes, threads, or an engine of plugins/engines
own_code    code of the user, by a name that each process can load
fork_server a process that has imported what others need, and is forked; preloaded: its first imports;
            whether importing a script would run it again
interpreter     one call in an interpreter of its own
bar         a progress bar
shared_tensors  tensors in shared memory without a name
family      child processes, and their end
"""
