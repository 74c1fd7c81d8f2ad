"""Bytes in and out of folders and object stores, and their copies on this node.

storage         a URL -> a store, and its client in each process; local (folders), s3 (through boto3), more stores in
                plugins/stores
failures        kinds of failed requests, the same for every store; errors of disks with their remedies
retry           repeated requests with a time limit; threads that forks wait for
locks           locks between processes; names of unfinished files
owner           the live run that owns a prefix in a store
fetch_config    settings of downloads, and their counts
cache           copies of a remote dataset's files on this node
record          known facts of a copy
eviction        the limit of a cache folder, and the journal of its files
prefetch        downloads ahead of their reader
"""
