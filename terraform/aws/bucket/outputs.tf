output "name" {
  description = "The bucket's name, once nobody can write to it without its rules."
  value       = format("%s", aws_s3_bucket.this.id) # not null, which a plan knows of a text and not of an attribute
  depends_on = [
    aws_s3_bucket_policy.this, aws_s3_bucket_public_access_block.this,
    aws_s3_bucket_ownership_controls.this, aws_s3_bucket_server_side_encryption_configuration.this,
  ]
}
