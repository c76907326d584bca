# One fleet for one run, with the provider of versions.tf. A root module of your own may call ./aws as often as it likes:
# examples/.

module "fleet" {
  source = "./aws"

  run                 = var.run
  command             = var.command
  source_archive      = var.source_archive
  harness_package     = var.harness_package
  setup_command       = var.setup_command
  python              = var.python
  container_image     = var.container_image
  settings            = var.settings
  env                 = var.env
  secrets             = var.secrets
  secrets_kms_key_arn = var.secrets_kms_key_arn

  instance_types         = var.instance_types
  gpu_memory_gb          = var.gpu_memory_gb
  mix_gpu_memory         = var.mix_gpu_memory
  instance_requirements  = var.instance_requirements
  require_nvme           = var.require_nvme
  on_demand_percentage   = var.on_demand_percentage
  allocation_strategy    = var.allocation_strategy
  capacity_rebalance     = var.capacity_rebalance
  desired_capacity       = var.desired_capacity
  max_size               = var.max_size
  ami_id                 = var.ami_id
  ami_ssm_parameter      = var.ami_ssm_parameter
  root_volume_gb         = var.root_volume_gb
  root_volume_mb_s       = var.root_volume_mb_s
  root_volume_fetch_mb_s = var.root_volume_fetch_mb_s
  hook_timeout_s         = var.hook_timeout_s
  launch_timeout_s       = var.launch_timeout_s
  efa                    = var.efa
  placement_group        = var.placement_group

  bucket              = var.bucket
  bucket_prefix       = var.bucket_prefix
  delete_checkpoints  = var.delete_checkpoints
  kms_key_arn         = var.kms_key_arn
  data_bucket_arns    = var.data_bucket_arns
  vpc_id              = var.vpc_id
  subnet_ids          = var.subnet_ids
  s3_gateway_endpoint = var.s3_gateway_endpoint

  notify_email        = var.notify_email
  without_notices     = var.without_notices
  stop_after_s        = var.stop_after_s
  max_hours           = var.max_hours
  max_usd_per_hour    = var.max_usd_per_hour
  durable_age_alarm_s = var.durable_age_alarm_s
  crash_loop_starts   = var.crash_loop_starts
  budget_usd          = var.budget_usd
  enable_drill        = var.enable_drill
  tags                = var.tags
}
