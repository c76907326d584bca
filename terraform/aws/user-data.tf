# The script that an instance starts with: its settings, and where the scripts are that make it a node.

locals {
  node_env = merge(
    var.env,
    { for name, value in var.settings : "HARNESS_${upper(name)}" => value },
    length(var.secrets) == 0 ? {} : { HARNESS_SECRETS = join(" ", [for name, arn in var.secrets : "${name}=${arn}"]) },
    {
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
    },
  )

  # KEY="value", which systemd's EnvironmentFile and bash's `source` read alike: \ " $ and ` have a backslash before them.
  node_env_file = join("", [
    for name, value in local.node_env : "${name}=\"${replace(value, "/([\\x22\\x24\\x5c\\x60])/", "\\$1")}\"\n"
  ])

  # Everything that a user wrote passes as base64: no value can end a quote, or begin a command.
  user_data = templatefile("${path.module}/user-data.sh.tftpl", {
    node_env = base64encode(local.node_env_file)
    bucket   = local.bucket
    region   = local.region
    scripts  = { for name, digest in local.scripts : name => { sha256 = digest, key = aws_s3_object.script[name].key } }
  })

  user_data_gzip  = base64gzip(local.user_data) # cloud-init unpacks it
  user_data_bytes = length(local.user_data_gzip) / 4 * 3

  scripts = {
    for name in ["bootstrap-node.sh", "resume.sh", "stop-fleet.sh"] : name => filesha256("${path.module}/../scripts/${name}")
  }
}

# Not in the user data, which has room for 16 KB.
resource "aws_s3_object" "script" {
  #checkov:skip=CKV_AWS_186: encrypted as the bucket says; kms_key_arn names a key
  for_each = local.scripts

  bucket = local.bucket
  key    = "sources/${var.run}/scripts/${substr(each.value, 0, 16)}/${each.key}"
  source = "${path.module}/../scripts/${each.key}"

  lifecycle {
    create_before_destroy = true # the old one is needed until the launch template names the new one
  }
}
