# The script that an instance starts with: its settings, and the two scripts that make it a node.

locals {
  node_env = merge(
    { for name, value in var.settings : "HARNESS_${upper(name)}" => value },
    {
      HARNESS_RUN        = var.run
      HARNESS_STORE      = local.store
      HARNESS_COMMAND    = var.command
      HARNESS_SOURCE     = local.source
      HARNESS_PACKAGE    = var.harness_package
      HARNESS_SETUP      = var.setup_command
      HARNESS_PYTHON     = var.python
      HARNESS_IMAGE      = var.container_image
      HARNESS_GROUP      = local.name
      HARNESS_HOOK       = local.hook
      HARNESS_TOPIC      = aws_sns_topic.this.arn
      HARNESS_METRICS    = local.metrics
      HARNESS_LOG_GROUP  = aws_cloudwatch_log_group.this.name
      AWS_REGION         = local.region
      AWS_DEFAULT_REGION = local.region
    },
  )

  # KEY="value", which systemd's EnvironmentFile and bash's `source` read alike: \ " $ and ` have a backslash before them.
  node_env_file = join("", [
    for name, value in local.node_env : "${name}=\"${replace(value, "/([\\x22\\x24\\x5c\\x60])/", "\\$1")}\"\n"
  ])

  # Everything that a user wrote passes as base64: no value can end a quote, or begin a command.
  user_data = templatefile("${path.module}/user-data.sh.tftpl", {
    node_env       = base64encode(local.node_env_file)
    bootstrap_node = base64gzip(file("${path.module}/../scripts/bootstrap-node.sh"))
    resume         = base64gzip(file("${path.module}/../scripts/resume.sh"))
  })

  user_data_gzip = base64gzip(local.user_data) # cloud-init unpacks it
}
