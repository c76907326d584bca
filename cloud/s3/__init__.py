"""AWS's S3 and S3-compatible services as a store."""
