"""S3 as a store, and what is compatible with it."""
