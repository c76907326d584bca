# The bucket of checkpoints and code: a new one (bucket/), or a given one that is only looked at.

module "bucket" {
  source = "./bucket"
  count  = var.bucket == null ? 1 : 0

  # A bucket's name has 63 characters, of which AWS's random ending takes 26, and no underscore.
  name_prefix        = "${trimsuffix(substr("harness-${lower(replace(var.run, "_", "-"))}", 0, 36), "-")}-"
  checkpoints        = var.bucket_prefix
  delete_checkpoints = var.delete_checkpoints
  kms_key_arn        = var.kms_key_arn
  tags               = local.tags
}

data "aws_s3_bucket" "given" {
  count  = var.bucket == null ? 0 : 1
  bucket = var.bucket

  lifecycle {
    postcondition {
      # Of the attributes that say where it is, the only one that has the same name in the versions 5 and 6 of the provider.
      condition     = regex("^.*[.]s3[.-]([^.]+)[.]amazonaws[.]com", self.bucket_regional_domain_name)[0] == local.region
      error_message = "bucket: ${var.bucket} is in ${regex("^.*[.]s3[.-]([^.]+)[.]amazonaws[.]com", self.bucket_regional_domain_name)[0]}, and the fleet in ${local.region}: every checkpoint would cross regions, slowly and for money. Name a bucket in ${local.region}, or set region."
    }
  }
}

locals {
  bucket = var.bucket == null ? module.bucket[0].name : data.aws_s3_bucket.given[0].id
}
