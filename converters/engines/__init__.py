"""What does the tasks of a conversion: tasks out, results in, whichever is done first.

engine          the choice: processes of this machine (lmms_stream/processes), or a cluster
threads         threads of this process, for tasks that wait
ray_cluster     a connection to a Ray cluster
ray_workers     workers on it
"""
