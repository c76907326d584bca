# Names, ARNs and tags that several files share; nothing here is made.

data "aws_caller_identity" "current" {}
data "aws_partition" "current" {}

data "aws_availability_zones" "region" {
  #checkov:skip=CKV_AWS_394: of it, only the code of the region is used, which all of its zones share
  filter {
    name   = "zone-type"
    values = ["availability-zone"]
  }
}

locals {
  partition = data.aws_partition.current.partition
  account   = data.aws_caller_identity.current.account_id
  region    = data.aws_availability_zones.region.id # by this name in the versions 5 and 6 of the provider

  name        = "harness-${var.run}"
  global_name = "${local.name}-${local.region_code}"                                # of what an account has once for all its regions
  region_code = split("-", sort(data.aws_availability_zones.region.zone_ids)[0])[0] # euw1: a role's name has 64 characters
  store       = "s3://${local.bucket}/${var.bucket_prefix}"
  hook        = "${local.name}-drain"
  launch_hook = "${local.name}-ready"
  metrics     = "Harness" # CloudWatch's namespace; the dimension is the run
  group_arn   = "arn:${local.partition}:autoscaling:${local.region}:${local.account}:autoScalingGroup:*:autoScalingGroupName/${local.name}"
  bucket_arn  = "arn:${local.partition}:s3:::${local.bucket}"
  run_objects = "${local.bucket_arn}/${var.bucket_prefix}/${var.run}"

  tags = merge(var.tags, { harness-run = var.run })

  # What `scripts/resume.sh` finds through the metadata service, where flags and environment say nothing.
  instance_tags = merge(
    local.tags,
    { Name = local.name, harness-store = local.store },
    length(var.command) <= 256 ? { harness-command = var.command } : {}, # EC2 takes no longer value
  )
}
