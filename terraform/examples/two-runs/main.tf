# Two runs that share a bucket: each has a fleet of its own, and ends by itself.

variable "notify_email" {
  type = string
}

variable "source_archive" {
  type    = string
  default = "my-project.tar.gz" # scripts/pack ~/my-project
}

module "bucket" {
  source      = "../../aws/bucket"
  name_prefix = "harness-team-"
}

module "small" {
  source = "../../aws"

  run            = "gpt-small"
  command        = "python train.py --layers 6"
  source_archive = var.source_archive
  bucket         = module.bucket.name
  notify_email   = var.notify_email
}

module "large" {
  source = "../../aws"

  run              = "gpt-large"
  command          = "python train.py --layers 24"
  source_archive   = var.source_archive
  bucket           = module.bucket.name
  notify_email     = var.notify_email
  gpu_memory_gb    = 48
  max_usd_per_hour = 2
}

output "next" {
  value = { small = module.small.next, large = module.large.next }
}
