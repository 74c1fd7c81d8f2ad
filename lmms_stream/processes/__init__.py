"""Processes of this machine that do tasks for the one that started them: tasks out, results in.

pool        the processes, what they are given and what they answer
sendable    what can be sent to them
own_code    code of the user's own, by a name that any of them can load
main_guard  whether a script would run again in processes that import it
fork_server a process that has imported what others need, and is forked; preloaded: what it imports first
alone       one call in an interpreter of its own, which a script need not be written for
bar         how far such work is, on a terminal
shared_tensors  tensors in memory that processes share, without a name
family      the processes that a process has started
ending      the end of a process whose work is done
"""
