# Addresses until the module was split in two. A state of that time needs no command: the next apply moves it.

moved {
  from = aws_cloudwatch_metric_alarm.durable_age
  to   = module.fleet.aws_cloudwatch_metric_alarm.durable_age
}

moved {
  from = aws_cloudwatch_metric_alarm.crash_loop
  to   = module.fleet.aws_cloudwatch_metric_alarm.crash_loop
}

moved {
  from = aws_cloudwatch_metric_alarm.failed_starts
  to   = module.fleet.aws_cloudwatch_metric_alarm.failed_starts
}

moved {
  from = aws_budgets_budget.this
  to   = module.fleet.aws_budgets_budget.this
}

moved {
  from = aws_fis_experiment_template.drill
  to   = module.fleet.aws_fis_experiment_template.drill
}

moved {
  from = aws_iam_role.drill
  to   = module.fleet.aws_iam_role.drill
}

moved {
  from = aws_iam_role_policy.drill
  to   = module.fleet.aws_iam_role_policy.drill
}

moved {
  from = aws_sns_topic.this
  to   = module.fleet.aws_sns_topic.this
}

moved {
  from = aws_sns_topic_policy.this
  to   = module.fleet.aws_sns_topic_policy.this
}

moved {
  from = aws_sns_topic_subscription.email
  to   = module.fleet.aws_sns_topic_subscription.email
}

moved {
  from = aws_cloudwatch_log_group.this
  to   = module.fleet.aws_cloudwatch_log_group.this
}

moved {
  from = aws_cloudwatch_event_rule.this
  to   = module.fleet.aws_cloudwatch_event_rule.this
}

moved {
  from = aws_cloudwatch_event_target.topic
  to   = module.fleet.aws_cloudwatch_event_target.topic
}

moved {
  from = aws_autoscaling_group.this
  to   = module.fleet.aws_autoscaling_group.this
}

moved {
  from = terraform_data.hook_timeout
  to   = module.fleet.terraform_data.hook_timeout
}

moved {
  from = aws_placement_group.this
  to   = module.fleet.aws_placement_group.this
}

moved {
  from = terraform_data.image
  to   = module.fleet.terraform_data.image
}

moved {
  from = aws_launch_template.node
  to   = module.fleet.aws_launch_template.node
}

moved {
  from = aws_autoscaling_policy.stop
  to   = module.fleet.aws_autoscaling_policy.stop
}

moved {
  from = aws_cloudwatch_metric_alarm.no_progress
  to   = module.fleet.aws_cloudwatch_metric_alarm.no_progress
}

moved {
  from = aws_cloudwatch_metric_alarm.never_ready
  to   = module.fleet.aws_cloudwatch_metric_alarm.never_ready
}

moved {
  from = terraform_data.began
  to   = module.fleet.terraform_data.began
}

moved {
  from = aws_autoscaling_schedule.end
  to   = module.fleet.aws_autoscaling_schedule.end
}

moved {
  from = aws_security_group.node
  to   = module.fleet.aws_security_group.node
}

moved {
  from = aws_vpc_security_group_egress_rule.anywhere
  to   = module.fleet.aws_vpc_security_group_egress_rule.anywhere
}

moved {
  from = aws_vpc_security_group_ingress_rule.between_nodes
  to   = module.fleet.aws_vpc_security_group_ingress_rule.between_nodes
}

moved {
  from = aws_vpc_security_group_egress_rule.between_nodes
  to   = module.fleet.aws_vpc_security_group_egress_rule.between_nodes
}

moved {
  from = aws_vpc_endpoint.s3
  to   = module.fleet.aws_vpc_endpoint.s3
}

moved {
  from = terraform_data.one_run
  to   = module.fleet.terraform_data.one_run
}

moved {
  from = aws_iam_role.node
  to   = module.fleet.aws_iam_role.node
}

moved {
  from = aws_iam_instance_profile.node
  to   = module.fleet.aws_iam_instance_profile.node
}

moved {
  from = aws_iam_role_policy.node
  to   = module.fleet.aws_iam_role_policy.node
}

moved {
  from = aws_s3_object.source
  to   = module.fleet.aws_s3_object.source
}

moved {
  from = aws_s3_object.script
  to   = module.fleet.aws_s3_object.script
}

moved {
  from = module.bucket
  to   = module.fleet.module.bucket
}
