# The script that an instance starts with, in any cloud: its settings, and where the scripts are that make it a node.

locals {
  node_env = merge(
    var.env,
    { for name, value in var.settings : "HARNESS_${upper(name)}" => value },
    length(var.secrets) == 0 ? {} : { HARNESS_SECRETS = join(" ", [for name, at in var.secrets : "${name}=${at}"]) },
    var.told,
  )

  # KEY="value", which systemd's EnvironmentFile and bash's `source` read alike: \ " $ and ` have a backslash before them.
  node_env_file = join("", [
    for name, value in local.node_env : "${name}=\"${replace(value, "/([\\x22\\x24\\x5c\\x60])/", "\\$1")}\"\n"
  ])

  # In the store by its digest: an instance runs the bytes that Terraform has seen, or none. The user data has no room for
  # them (EC2 takes 16 KB).
  scripts = {
    for name in ["bootstrap-node.sh", "resume.sh", "stop-fleet.sh"] : name => {
      path   = "${path.module}/../../scripts/${name}"
      sha256 = filesha256("${path.module}/../../scripts/${name}")
      key    = "${var.scripts_in}/${substr(filesha256("${path.module}/../../scripts/${name}"), 0, 16)}/${name}"
    }
  }

  # Everything that a user wrote passes as base64: no value can end a quote, or begin a command.
  user_data = templatefile("${path.module}/user-data.sh.tftpl", {
    node_env = base64encode(local.node_env_file)
    fetch    = trimspace(var.fetch)
    scripts  = local.scripts
  })
}
