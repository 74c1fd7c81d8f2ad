"""Bytes in and out of folders and object stores, and their copies on this node.

storage     a URL -> a store; local folders and MosaicML's clouds; s3: S3 through boto3
retry       requests that are tried again, and bounded in time
locks       locks between processes; threads: threads that forks wait for
cache       copies of a remote dataset's files on this node; tally: how many were there
room        the limit that copies keep to
prefetch    downloads ahead of their reader
"""
