"""Stores other than folders and S3, a file each: see STORES in storage/storage.py.

gcs         Google Cloud Storage
azure       Azure Blob Storage
hub         the Hugging Face hub, for reading
clouds      others, through MosaicML Streaming's downloaders
"""
