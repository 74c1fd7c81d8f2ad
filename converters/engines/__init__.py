"""Task executors of a conversion: tasks in, results out, in the order of completion.

engine          the choice: processes of this machine (lmms_stream/processes), threads, or an engine of plugins/engines
"""
