# What a node of this cloud is told, and how it fetches its scripts.

module "node" {
  source = "../node"

  settings = var.settings
  env      = var.env
  secrets  = var.secrets

  told = {
    HARNESS_RUN         = var.run
    HARNESS_STORE       = local.store
    HARNESS_COMMAND     = var.command
    HARNESS_SOURCE      = local.source
    HARNESS_PACKAGE     = var.harness_package
    HARNESS_SETUP       = var.setup_command
    HARNESS_PYTHON      = var.python
    HARNESS_IMAGE       = var.container_image
    HARNESS_GROUP       = local.name
    HARNESS_HOOK        = local.hook
    HARNESS_LAUNCH_HOOK = local.launch_hook
    HARNESS_TOPIC       = aws_sns_topic.this.arn
    HARNESS_METRICS     = local.metrics
    HARNESS_LOG_GROUP   = aws_cloudwatch_log_group.this.name
    AWS_REGION          = local.region
    AWS_DEFAULT_REGION  = local.region
  }

  scripts_in = "sources/${var.run}/scripts"
  fetch      = templatefile("${path.module}/get-object.sh.tftpl", { bucket = local.bucket, region = local.region })
}

locals {
  user_data_gzip  = base64gzip(module.node.user_data) # cloud-init unpacks it
  user_data_bytes = length(local.user_data_gzip) / 4 * 3
}

resource "aws_s3_object" "script" {
  #checkov:skip=CKV_AWS_186: encrypted as the bucket says; kms_key_arn names a key
  for_each = module.node.scripts

  bucket = local.bucket
  key    = each.value.key
  source = each.value.path
  tags   = local.tags

  lifecycle {
    create_before_destroy = true # the old one is needed until the launch template names the new one
  }
}
