# What changes when which variable changes. Few runs with many variables each: every run loads the provider again.

mock_provider "aws" {
  source = "./tests/account"
}

variables {
  run            = "gpt"
  command        = "python train.py"
  source_archive = "tests/source.tar.gz"
  notify_email   = "team@example.com"
}

run "named_types_in_their_order_close_together" {
  variables {
    instance_types       = ["m5.large", "g5.xlarge"]
    require_nvme         = false
    allocation_strategy  = "capacity-optimized-prioritized"
    on_demand_percentage = 100
    capacity_rebalance   = true
    efa                  = true
    placement_group      = true
    subnet_ids           = ["subnet-1"]
  }
  override_data {
    target = data.aws_ec2_instance_type.each
    values = { instance_storage_supported = false, efa_supported = true, supported_architectures = ["x86_64"] }
  }
  assert {
    condition     = aws_autoscaling_group.this.mixed_instances_policy[0].launch_template[0].override[*].instance_type == tolist(["m5.large", "g5.xlarge"])
    error_message = "the order is the priority"
  }
  assert {
    condition     = aws_autoscaling_group.this.mixed_instances_policy[0].instances_distribution[0].on_demand_percentage_above_base_capacity == 100 && aws_autoscaling_group.this.capacity_rebalance
    error_message = "the variables"
  }
  assert {
    condition     = aws_launch_template.node.network_interfaces[0].interface_type == "efa" && aws_autoscaling_group.this.placement_group == "harness-gpt"
    error_message = "the interface and the group"
  }
  assert {
    condition     = aws_vpc_security_group_ingress_rule.between_nodes[0].cidr_ipv4 == null && aws_vpc_security_group_ingress_rule.between_nodes[0].referenced_security_group_id == aws_security_group.node.id
    error_message = "in from the run's own nodes, from nowhere else"
  }
}

run "requirements_take_the_place_of_types_and_code_comes_from_git" {
  variables {
    instance_requirements = { gpu_count = 8, gpu_memory_gib = 320 }
    source_archive        = "git+https://example.com/team/gpt@v1"
    s3_gateway_endpoint   = false
  }
  assert {
    condition     = length(aws_autoscaling_group.this.mixed_instances_policy[0].launch_template[0].override) == 1 && length(data.aws_ec2_instance_type.each) == 0
    error_message = "one override, of requirements"
  }
  assert {
    condition = (
      aws_autoscaling_group.this.mixed_instances_policy[0].launch_template[0].override[0].instance_requirements[0].accelerator_count[0].min == 8 &&
      aws_autoscaling_group.this.mixed_instances_policy[0].launch_template[0].override[0].instance_requirements[0].accelerator_total_memory_mib[0].min == 320 * 1024 &&
      aws_autoscaling_group.this.mixed_instances_policy[0].launch_template[0].override[0].instance_requirements[0].local_storage == "required"
    )
    error_message = "GPUs, their memory, and NVMe"
  }
  assert {
    condition     = module.node.node_env.HARNESS_SOURCE == "git+https://example.com/team/gpt@v1" && length(aws_s3_object.source) == 0
    error_message = "nothing is uploaded"
  }
  assert {
    condition     = length(aws_vpc_endpoint.s3) == 0
    error_message = "AWS would refuse it"
  }
}

run "a_given_bucket_is_used_as_it_is_and_rights_come_with_what_needs_them" {
  variables {
    bucket           = "given-bucket"
    bucket_prefix    = "team/checkpoints"
    kms_key_arn      = "arn:aws:kms:us-east-1:123456789012:key/abc"
    data_bucket_arns = ["arn:aws:s3:::corpus"]
    container_image  = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/team/train:v3"
    harness_package  = "s3://wheels/harness_spot-1-py3-none-any.whl"
  }
  assert {
    condition     = length(module.bucket) == 0 && output.store == "s3://given-bucket/team/checkpoints"
    error_message = "nothing is made for it"
  }
  assert {
    condition     = strcontains(aws_iam_role_policy.node.policy, "arn:aws:s3:::given-bucket/team/checkpoints/gpt/snapshots/*")
    error_message = "the rights follow the prefix"
  }
  assert {
    condition     = one([for may in jsondecode(aws_iam_role_policy.node.policy).Statement : may if may.Sid == "Encrypt"]).Resource == "arn:aws:kms:us-east-1:123456789012:key/abc"
    error_message = "the key"
  }
  assert {
    condition     = one([for may in jsondecode(aws_iam_role_policy.node.policy).Statement : may if may.Sid == "ReadCodeAndData"]).Resource == ["arn:aws:s3:::given-bucket/sources/gpt/*", "arn:aws:s3:::wheels/harness_spot-1-py3-none-any.whl", "arn:aws:s3:::corpus/*"]
    error_message = "the wheel and the data"
  }
  assert {
    condition     = one([for may in jsondecode(aws_iam_role_policy.node.policy).Statement : may if may.Sid == "PullImage"]).Resource == "arn:aws:ecr:eu-west-1:123456789012:repository/team/train"
    error_message = "the image"
  }
}

run "what_a_node_is_told_ends_no_quote_and_begins_no_command" {
  variables {
    command        = "echo \"$HOME\" `id` \\ 'x'"
    settings       = { every_s = "30" }
    source_archive = "tests/source.tar.gz"
  }
  assert {
    condition     = module.node.node_env.HARNESS_STORE == "s3://new-bucket/checkpoints" && module.node.node_env.HARNESS_RUN == "gpt" && module.node.node_env.HARNESS_EVERY_S == "30"
    error_message = "the run, its store, and settings by their names"
  }
  assert {
    condition     = module.node.node_env.HARNESS_GROUP == aws_autoscaling_group.this.name && toset([module.node.node_env.HARNESS_HOOK, module.node.node_env.HARNESS_LAUNCH_HOOK]) == toset(aws_autoscaling_group.this.initial_lifecycle_hook[*].name)
    error_message = "the group and the hooks are those that are made"
  }
  assert {
    condition     = strcontains(module.node.node_env_file, "HARNESS_COMMAND=\"echo \\\"\\$HOME\\\" \\`id\\` \\\\ 'x'\"\n")
    error_message = "backslashes before \\ \" $ and `"
  }
  assert {
    condition     = !strcontains(module.node.user_data, "`id`")
    error_message = "what a user wrote is in the script as base64 only"
  }
  assert {
    condition     = aws_s3_object.source[0].key == "sources/gpt/${substr(filesha256("tests/source.tar.gz"), 0, 16)}.tar.gz" && module.node.node_env.HARNESS_SOURCE == "s3://new-bucket/${aws_s3_object.source[0].key}"
    error_message = "by content, so that new code is a new object"
  }
  assert {
    condition     = one([for may in jsondecode(aws_iam_role_policy.node.policy).Statement : may if may.Sid == "ReadCodeAndData"]).Resource == ["arn:aws:s3:::new-bucket/sources/gpt/*"]
    error_message = "the node may read it"
  }
}

run "a_long_command_is_no_tag_and_an_archive_in_s3_is_looked_at" {
  variables {
    command        = format("python train.py %0300d", 0)
    source_archive = "s3://code/gpt/v1.tar.gz"
  }
  assert {
    condition     = !contains([for tag in aws_autoscaling_group.this.tag : tag.key], "harness-command")
    error_message = "EC2 takes 256 characters"
  }
  assert {
    condition     = data.aws_s3_object.source_archive[0].bucket == "code" && data.aws_s3_object.source_archive[0].key == "gpt/v1.tar.gz" && length(aws_s3_object.source) == 0
    error_message = "the plan asks for it"
  }
  assert {
    condition     = strcontains(aws_iam_role_policy.node.policy, "arn:aws:s3:::code/gpt/v1.tar.gz") && module.node.node_env.HARNESS_SOURCE == "s3://code/gpt/v1.tar.gz"
    error_message = "the node may read that object"
  }
}

run "mail_budget_drill_and_thresholds" {
  variables {
    budget_usd          = 250
    max_hours           = 48
    max_usd_per_hour    = 1.25
    stop_after_s        = 172800
    enable_drill        = true
    durable_age_alarm_s = 900
    crash_loop_starts   = 3
  }
  assert {
    condition     = aws_sns_topic_subscription.email[0].endpoint == "team@example.com" && aws_budgets_budget.this[0].limit_amount == "250"
    error_message = "the address and the amount"
  }
  assert {
    condition     = aws_autoscaling_group.this.mixed_instances_policy[0].instances_distribution[0].spot_max_price == "1.25"
    error_message = "the price"
  }
  assert {
    condition     = aws_autoscaling_schedule.end[0].desired_capacity == 0 && aws_autoscaling_schedule.end[0].start_time == timeadd(terraform_data.began.output, "48h")
    error_message = "two days after the first apply"
  }
  assert {
    condition     = aws_cloudwatch_metric_alarm.no_progress.evaluation_periods == 48
    error_message = "two days are periods of an hour"
  }
  assert {
    condition     = one(one(aws_fis_experiment_template.drill[0].target).resource_tag).value == "gpt" && one(aws_fis_experiment_template.drill[0].target).selection_mode == "COUNT(1)"
    error_message = "one instance, of this run"
  }
  assert {
    condition     = jsondecode(aws_iam_role_policy.drill[0].policy).Statement[0].Condition.StringEquals["aws:ResourceTag/harness-run"] == "gpt"
    error_message = "the drill's role reaches this run only"
  }
  assert {
    condition     = aws_cloudwatch_metric_alarm.durable_age.treat_missing_data == "breaching" && aws_cloudwatch_metric_alarm.durable_age.threshold == 900
    error_message = "silence is bad"
  }
  assert {
    condition     = aws_cloudwatch_metric_alarm.crash_loop.threshold == 3 && aws_cloudwatch_metric_alarm.crash_loop.statistic == "Sum" && aws_cloudwatch_metric_alarm.crash_loop.period == 3600
    error_message = "starts in an hour"
  }
}
