output "user_data" {
  description = "The script that makes a node of a fresh instance."
  value       = local.user_data
}

output "scripts" {
  description = "What has to be in the store before a node boots: by name, the file here, its digest, and its key."
  value       = local.scripts
}

output "node_env" {
  description = "What a node is told, by the names of its environment."
  value       = local.node_env
}

output "node_env_file" {
  description = "The same, as a node has it in /etc/harness/node.env."
  value       = local.node_env_file
}
