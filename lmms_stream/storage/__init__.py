"""Bytes in and out of folders and object stores, and their copies on this node.

storage         a URL -> a store: local (folders), s3 (through boto3), gcs, azure and hub (through their own
                libraries), clouds (others, through MosaicML's code); clients: one for each process
failures        kinds of failed requests, the same for every store
retry           requests that are tried again, and bounded in time
disk_errors     what a disk refuses, said with the remedy
sizes           sizes in bytes as people write them
mapping         files in memory, without open descriptors
locks           locks between processes; threads: threads that forks wait for
temporaries     names of files while they are written
fetch_config    how shards come to this node
cache           copies of a remote dataset's files on this node; wanted: what they must be; tally: how many were there
peers           files from the caches of other nodes; peer_server: what gives them; peer_directory: who has which
record          what is known of a copy
outlook         what is known of when copies are needed next
ledger          what downloads take in a folder; room: the limit that they keep to
prefetch        downloads ahead of their reader
"""
