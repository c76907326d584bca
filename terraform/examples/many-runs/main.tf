# Many runs from a table: a line more is a fleet more, a line less ends one. Their checkpoints stay in the bucket.

variable "notify_email" {
  type = string
}

variable "source_archive" {
  type    = string
  default = "my-project.tar.gz" # scripts/pack ~/my-project
}

locals {
  runs = { for line in csvdecode(file("${path.module}/runs.csv")) : line.run => line }
}

module "bucket" {
  source      = "../../aws/bucket"
  name_prefix = "harness-sweep-"
}

module "run" {
  source   = "../../aws"
  for_each = local.runs

  run            = each.key
  command        = "python train.py --seed ${each.value.seed} --lr ${each.value.lr}"
  source_archive = var.source_archive
  gpu_memory_gb  = tonumber(each.value.gpu_memory_gb)
  bucket         = module.bucket.name
  notify_email   = var.notify_email
}

output "stores" {
  value = { for name, run in module.run : name => run.store }
}
