# What a user needs next.

output "bucket" {
  description = "The bucket of the checkpoints. To come back after a destroy: -var bucket=…"
  value       = local.bucket
}

output "store" {
  description = "What --store is on any machine that may read the bucket."
  value       = local.store
}

output "group" {
  description = "The Auto Scaling group."
  value       = aws_autoscaling_group.this.name
}

output "log_group" {
  description = "Where nodes and events write."
  value       = aws_cloudwatch_log_group.this.name
}

output "topic" {
  description = "The SNS topic of notices and alarms."
  value       = aws_sns_topic.this.arn
}

output "role" {
  description = "The role of the nodes, for policies of your own."
  value       = aws_iam_role.node.name
}

output "drill" {
  description = "The template that interrupts one instance; null without enable_drill."
  value       = one(aws_fis_experiment_template.drill[*].id)
}

output "next" {
  description = "What to do next, as commands."
  value       = <<-NEXT
    progress   harness status --store ${local.store} --run ${var.run}
    log        aws logs tail ${aws_cloudwatch_log_group.this.name} --follow --region ${local.region}
    instances  aws autoscaling describe-scaling-activities --auto-scaling-group-name ${local.name} --region ${local.region} --max-items 5
    shell      aws ssm start-session --region ${local.region} --target INSTANCE
    stop       aws autoscaling update-auto-scaling-group --auto-scaling-group-name ${local.name} --region ${local.region} --min-size 0 --desired-capacity 0
    go on      terraform apply, with the same variables
    interrupt  ${var.enable_drill ? "aws fis start-experiment --region ${local.region} --experiment-template-id ${aws_fis_experiment_template.drill[0].id}" : "terraform apply -var enable_drill=true adds a drill"}
  NEXT
}
