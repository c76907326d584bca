# What a user needs next.

output "bucket" {
  description = "The bucket of the checkpoints. To come back after a destroy: -var bucket=…"
  value       = module.fleet.bucket
}

output "store" {
  description = "What --store is on any machine that may read the bucket."
  value       = module.fleet.store
}

output "group" {
  description = "The Auto Scaling group."
  value       = module.fleet.group
}

output "log_group" {
  description = "Where nodes and events write."
  value       = module.fleet.log_group
}

output "topic" {
  description = "The SNS topic of notices and alarms."
  value       = module.fleet.topic
}

output "role" {
  description = "The role of the nodes, for policies of your own."
  value       = module.fleet.role
}

output "drill" {
  description = "The template that interrupts one instance; null without enable_drill."
  value       = module.fleet.drill
}

output "next" {
  description = "What to do next, as commands."
  value       = module.fleet.next
}
