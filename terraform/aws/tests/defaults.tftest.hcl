# What a first user gets: no variable but the run, its command and code, and an address.

mock_provider "aws" {
  source = "./tests/account"
}

variables {
  run            = "gpt"
  command        = "python train.py"
  source_archive = "tests/source.tar.gz"
  notify_email   = "team@example.com"
}

run "all_spot_in_any_pool_behind_a_closed_door" {
  assert {
    condition     = aws_autoscaling_group.this.mixed_instances_policy[0].instances_distribution[0].on_demand_percentage_above_base_capacity == 0
    error_message = "AWS's default is 100 percent on demand"
  }
  assert {
    condition     = aws_autoscaling_group.this.mixed_instances_policy[0].instances_distribution[0].spot_allocation_strategy == "price-capacity-optimized"
    error_message = "the strategy"
  }
  assert {
    condition     = aws_autoscaling_group.this.mixed_instances_policy[0].launch_template[0].override[*].instance_type == tolist(["g6.xlarge", "g5.xlarge"])
    error_message = "of the usual types those that the region has, in their order"
  }
  assert {
    condition     = aws_autoscaling_group.this.capacity_rebalance == false && aws_autoscaling_group.this.suspended_processes == toset(["AZRebalance"])
    error_message = "nothing that ends an instance which could live"
  }
  assert {
    condition     = { for hook in aws_autoscaling_group.this.initial_lifecycle_hook : hook.lifecycle_transition => hook.default_result } == { "autoscaling:EC2_INSTANCE_TERMINATING" = "CONTINUE", "autoscaling:EC2_INSTANCE_LAUNCHING" = "ABANDON" }
    error_message = "an instance that ends and does not answer must not be held; one that does not come up must not be kept"
  }
  assert {
    condition     = aws_autoscaling_group.this.min_size == 0 && aws_autoscaling_group.this.desired_capacity == 1 && aws_autoscaling_group.this.max_size == 2
    error_message = "the sizes"
  }
  assert {
    condition     = aws_autoscaling_group.this.vpc_zone_identifier == toset(["subnet-1", "subnet-2"])
    error_message = "all subnets of the default VPC"
  }
  assert {
    condition = (
      aws_launch_template.node.metadata_options[0].http_tokens == "required" &&
      aws_launch_template.node.metadata_options[0].http_put_response_hop_limit == 2 &&
      aws_launch_template.node.metadata_options[0].instance_metadata_tags == "enabled"
    )
    error_message = "the metadata service"
  }
  assert {
    condition = (
      aws_launch_template.node.block_device_mappings[0].ebs[0].encrypted == "true" &&
      aws_launch_template.node.block_device_mappings[0].ebs[0].volume_type == "gp3"
    )
    error_message = "the root volume"
  }
  assert {
    condition     = length(aws_launch_template.node.network_interfaces) == 0 && length(aws_vpc_security_group_ingress_rule.between_nodes) == 0
    error_message = "no EFA, and no way in"
  }
  assert {
    condition     = length(module.bucket) == 1 && output.store == "s3://new-bucket/checkpoints"
    error_message = "a bucket of its own"
  }
  assert {
    condition     = output.bucket == "new-bucket" && length(data.aws_s3_bucket.given) == 0
    error_message = "no other is looked at"
  }
  assert {
    condition = one([for may in jsondecode(aws_iam_role_policy.node.policy).Statement : may if contains(flatten([may.Action]), "s3:DeleteObject")]).Resource == [
      "arn:aws:s3:::new-bucket/checkpoints/gpt/snapshots/*",
      "arn:aws:s3:::new-bucket/checkpoints/gpt/commits/*",
      "arn:aws:s3:::new-bucket/checkpoints/gpt/quarantine/*",
    ]
    error_message = "never generations, never events"
  }
  assert {
    condition     = one([for may in jsondecode(aws_iam_role_policy.node.policy).Statement : may if may.Sid == "List"]).Condition == { StringLike = { "s3:prefix" = "checkpoints/gpt/*" } }
    error_message = "it lists its own run only"
  }
  assert {
    condition = alltrue([
      for may in jsondecode(aws_iam_role_policy.node.policy).Statement : contains(["SeeGroups", "Measure", "SessionManager"], may.Sid) if may.Resource == "*"
    ])
    error_message = "everything on everything, but for actions that AWS does not narrow"
  }
  assert {
    condition     = alltrue([for action in flatten(jsondecode(aws_iam_role_policy.node.policy).Statement[*].Action) : !strcontains(action, "*")])
    error_message = "no action is a pattern"
  }
  assert {
    condition     = !strcontains(aws_iam_role_policy.node.policy, "kms:") && !strcontains(aws_iam_role_policy.node.policy, "ecr:") && !strcontains(aws_iam_role_policy.node.policy, "UpdateAutoScalingGroup")
    error_message = "no right without a use"
  }
  assert {
    condition     = alltrue([for target in aws_cloudwatch_event_target.topic : strcontains(target.input_transformer[0].input_template, "gpt")])
    error_message = "a mail that a person can read names the run"
  }
  assert {
    condition     = toset(keys(aws_cloudwatch_event_target.topic)) == toset(["interruption", "rebalance", "group"])
    error_message = "every stop of every instance of the account is nobody's mail"
  }
  assert {
    condition     = jsondecode(aws_cloudwatch_event_rule.this["group"].event_pattern).detail.AutoScalingGroupName == ["harness-gpt"]
    error_message = "of groups, ours"
  }
  assert {
    condition     = one([for query in aws_cloudwatch_metric_alarm.durable_age.metric_query : query.expression if query.return_data == true]) == "IF(FILL(desired, 0) > 0, FILL(age, 86400), 0)"
    error_message = "the age counts while instances are wanted, and its absence counts as a day"
  }
  assert {
    condition     = length(aws_autoscaling_schedule.end) + length(aws_budgets_budget.this) + length(aws_fis_experiment_template.drill) + length(aws_iam_role.drill) == 0
    error_message = "nothing that nobody asked for"
  }
  assert {
    condition     = aws_autoscaling_policy.stop.adjustment_type == "ExactCapacity" && one(aws_autoscaling_policy.stop.step_adjustment).scaling_adjustment == 0 && aws_autoscaling_policy.stop.policy_type == "StepScaling"
    error_message = "the switch sets the group to zero, also while an instance is being started"
  }
  assert {
    condition = alltrue([
      for alarm in [aws_cloudwatch_metric_alarm.no_progress, aws_cloudwatch_metric_alarm.never_ready] :
      contains(alarm.alarm_actions, aws_autoscaling_policy.stop.arn) && contains(alarm.alarm_actions, aws_sns_topic.this.arn) && alarm.datapoints_to_alarm == alarm.evaluation_periods
    ])
    error_message = "both alarms stop the fleet and tell people, once all of their periods are bad"
  }
  assert {
    condition     = aws_cloudwatch_metric_alarm.no_progress.evaluation_periods * one([for query in aws_cloudwatch_metric_alarm.no_progress.metric_query : query.metric[0].period if query.id == "steps"]) == 7200
    error_message = "two hours"
  }
  assert {
    condition     = !strcontains(jsonencode(aws_autoscaling_group.this.mixed_instances_policy), "\"spot_max_price\":\"")
    error_message = "AWS's own limit is the on-demand price"
  }
  assert {
    condition     = { for tag in aws_autoscaling_group.this.tag : tag.key => tag.value } == { Name = "harness-gpt", harness-run = "gpt", harness-store = "s3://new-bucket/checkpoints", harness-command = "python train.py" }
    error_message = "resume.sh finds the same in the tags"
  }
}
