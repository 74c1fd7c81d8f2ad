"""What is special about a family of models that read media: a file each, and no other file names one."""
