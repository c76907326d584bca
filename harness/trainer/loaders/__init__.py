"""Positions in DataLoaders and other loaders, so that a resumed run sees each batch once."""
