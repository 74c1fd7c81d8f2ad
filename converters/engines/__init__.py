"""Task executors of a conversion: tasks in, results out, in the order of completion.

engine          the choice: processes of this machine (lmms_stream/processes), threads, or a cluster
ray_cluster     a connection to a Ray cluster, and its workers
"""
