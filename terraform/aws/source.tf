# The run's code: uploaded from this machine, or found where it is.

locals {
  source_is_s3    = startswith(var.source_archive, "s3://")
  source_is_local = var.source_archive != "" && !can(regex("^(s3|git\\+https)://", var.source_archive))
  source_path     = local.source_is_local ? pathexpand(var.source_archive) : null
  source_digest   = local.source_is_local ? filesha256(local.source_path) : null
  source_ending   = local.source_is_local ? regex("\\.(?:tar\\.gz|tgz|zip)$", local.source_path) : null

  source = local.source_is_local ? "s3://${local.bucket}/${aws_s3_object.source[0].key}" : var.source_archive

  # s3://bucket/key, of whatever has to be read and is not in the run's own folder
  s3_addresses = [for address in [var.source_archive, var.harness_package] : regex("^s3://([^/]+)/(.+)$", address) if startswith(address, "s3://")]
}

# Named by its content: new code is a new object, and an instance never finds half of one.
resource "aws_s3_object" "source" {
  #checkov:skip=CKV_AWS_186: encrypted as the bucket says; kms_key_arn names a key
  count = local.source_is_local ? 1 : 0

  bucket = local.bucket
  key    = "sources/${var.run}/${substr(local.source_digest, 0, 16)}${local.source_ending}"
  source = local.source_path
  tags   = local.tags

  lifecycle {
    create_before_destroy = true # the old one is needed until the launch template names the new one
  }
}

# Fails the plan where the archive is not there, or may not be read.
data "aws_s3_object" "source_archive" {
  count  = local.source_is_s3 ? 1 : 0
  bucket = regex("^s3://([^/]+)/(.+)$", var.source_archive)[0]
  key    = regex("^s3://([^/]+)/(.+)$", var.source_archive)[1]
}
