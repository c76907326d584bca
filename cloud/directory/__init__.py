"""A directory as a store: local disks, NFS, shared file systems."""
