# What is refused before anything is made. Each run gives many variables a value that cannot be; all that are listed have to fail.

mock_provider "aws" {
  source = "./tests/account"
}

variables {
  run            = "gpt"
  command        = "python train.py"
  source_archive = "tests/source.tar.gz"
  notify_email   = "team@example.com"
}

run "names_and_numbers_that_cannot_be" {
  command = plan
  variables {
    run                  = "gpt 1.3b"
    command              = " "
    harness_package      = "s3://wheels/harness.tar.gz"
    setup_command        = "make\nHARNESS_RUN=other"
    python               = "python3"
    container_image      = "two words"
    settings             = { every_s = "30\nHARNESS_RUN=other" }
    bucket               = "s3://bucket/path"
    bucket_prefix        = "/checkpoints/"
    kms_key_arn          = "alias/mine"
    data_bucket_arns     = ["arn:aws:s3:::corpus/*"]
    instance_types       = [] # zero types
    on_demand_percentage = 101
    allocation_strategy  = "lowest-price"
    max_size             = 0 # below what is desired
    ami_id               = "ubuntu"
    ami_ssm_parameter    = "dlami"
    root_volume_gb       = 1
    hook_timeout_s       = 60
    launch_timeout_s     = 60
    stop_after_s         = 5000 # no multiple of 900
    max_hours            = 0
    placement_group      = true # without a subnet
    notify_email         = "team"
    budget_usd           = 0
    durable_age_alarm_s  = 10
    crash_loop_starts    = 0
    tags                 = { harness-run = "other" }
  }
  expect_failures = [
    var.run, var.command, var.harness_package, var.setup_command, var.python, var.container_image, var.settings,
    var.bucket, var.bucket_prefix, var.kms_key_arn, var.data_bucket_arns,
    var.instance_types, var.on_demand_percentage, var.allocation_strategy, var.max_size, var.ami_id, var.ami_ssm_parameter,
    var.root_volume_gb, var.hook_timeout_s, var.launch_timeout_s, var.stop_after_s, var.max_hours, var.placement_group,
    var.notify_email, var.budget_usd, var.durable_age_alarm_s, var.crash_loop_starts, var.tags,
  ]
}

run "two_instances_for_one_run" {
  command = plan
  variables {
    desired_capacity = 2
  }
  expect_failures = [var.desired_capacity]
}

run "a_program_without_code_and_a_fleet_that_tells_nobody" {
  command = plan
  variables {
    source_archive = ""
    notify_email   = null
  }
  expect_failures = [var.source_archive, var.notify_email]
}

run "an_archive_that_is_not_there_and_a_price_of_nothing" {
  command = plan
  variables {
    source_archive   = "tests/nowhere.tar.gz"
    max_usd_per_hour = 0
  }
  expect_failures = [var.source_archive, var.max_usd_per_hour]
}

run "a_limit_for_a_price_that_it_does_not_limit" {
  command = plan
  variables {
    max_usd_per_hour     = 1.5
    on_demand_percentage = 50
    stop_after_s         = 90900 # more than a day, and no whole hours
  }
  expect_failures = [var.max_usd_per_hour, var.stop_after_s]
}

run "two_answers_to_one_question" {
  command = plan
  variables {
    run                   = "a23456789b123456789c123456789d123456789e1" # one character too many
    source_archive        = "s3://code/gpt.rar"
    settings              = { store = "s3://elsewhere", every_second = "30" } # one is made here, the other does not exist
    instance_types        = ["g5.xlarge"]
    instance_requirements = { gpu_count = 1, gpu_memory_gib = 24 }
    allocation_strategy   = "capacity-optimized-prioritized" # requirements have no order
    bucket_prefix         = "sources"
  }
  expect_failures = [
    var.run, var.source_archive, var.settings, var.instance_types, var.allocation_strategy, var.bucket_prefix,
  ]
}

run "a_git_address_without_a_ref_and_no_gpu_at_all" {
  command = plan
  variables {
    instance_requirements = { gpu_count = 0, gpu_memory_gib = 24 }
    source_archive        = "git+https://example.com/team/gpt"
    settings              = { EVERY = "30" }
    bucket_prefix         = "sources/below"
    tags                  = { "cost center" = "7" } # EC2 would start no instance
  }
  expect_failures = [var.source_archive, var.settings, var.instance_requirements, var.bucket_prefix, var.tags]
}

run "a_secret_in_an_address_and_a_value_that_no_service_takes" {
  command = plan
  variables {
    source_archive = "git+https://token@example.com/team/gpt@main"
    tags           = { team = "research & development" }
  }
  expect_failures = [var.source_archive, var.tags]
}

run "a_root_volume_smaller_than_the_amis" {
  command = plan
  variables {
    root_volume_gb = 64
  }
  expect_failures = [aws_launch_template.node]
}

run "a_key_of_another_region" {
  command = plan
  variables {
    kms_key_arn = "arn:aws:kms:eu-west-1:123456789012:key/11111111-2222-3333-4444-555555555555"
  }
  expect_failures = [aws_launch_template.node]
}

run "what_the_region_does_not_have" {
  command = plan
  variables {
    bucket         = "far-away"
    subnet_ids     = ["subnet-9"]
    instance_types = ["g5.xlarge", "p9.huge"]
  }
  override_data {
    target = data.aws_s3_bucket.given[0]
    values = { id = "far-away", bucket_regional_domain_name = "far-away.s3.eu-west-1.amazonaws.com" }
  }
  expect_failures = [data.aws_s3_bucket.given, data.aws_subnets.all, data.aws_ec2_instance_types.offered]
}

run "a_type_without_nvme" {
  command = plan
  variables {
    instance_types = ["m5.large"]
  }
  override_data {
    target = data.aws_ec2_instance_type.each
    values = { instance_storage_supported = false, efa_supported = true, supported_architectures = ["x86_64"] }
  }
  expect_failures = [data.aws_ec2_instance_type.each]
}

run "a_type_that_the_ami_does_not_boot_on" {
  command = plan
  variables {
    instance_types = ["g5g.xlarge"]
  }
  override_data {
    target = data.aws_ec2_instance_type.each
    values = { instance_storage_supported = true, efa_supported = true, supported_architectures = ["arm64"] }
  }
  expect_failures = [data.aws_ec2_instance_type.each]
}

run "types_whose_gpus_have_different_memory" {
  command = plan
  variables {
    instance_types = ["g5.xlarge", "g6.xlarge"]
  }
  override_data {
    target = data.aws_ec2_instance_type.each["g5.xlarge"]
    values = { instance_storage_supported = true, efa_supported = true, supported_architectures = ["x86_64"], gpus = [{ count = 1, manufacturer = "NVIDIA", memory_size = 24576, name = "A10G" }] }
  }
  override_data {
    target = data.aws_ec2_instance_type.each["g6.xlarge"]
    values = { instance_storage_supported = true, efa_supported = true, supported_architectures = ["x86_64"], gpus = [{ count = 1, manufacturer = "NVIDIA", memory_size = 45776, name = "L40S" }] }
  }
  expect_failures = [aws_launch_template.node]
}

run "user_data_that_ec2_would_not_take" { # its length is known when the topic and the bucket have their names
  variables {
    setup_command = join("", [for number in range(400) : sha256(tostring(number))]) # digests do not compress
  }
  expect_failures = [aws_launch_template.node]
}

run "a_fleet_is_made" {
  variables {
    tags = { team = "Forschung: Köln", cost-center = "7" }
  }
}

run "another_run_in_its_state" {
  command = plan
  variables {
    run = "other"
  }
  expect_failures = [terraform_data.one_run]
}

run "another_region_in_its_state" {
  command = plan
  override_data {
    target = data.aws_availability_zones.region
    values = { id = "eu-west-1", zone_ids = ["euw1-az1"] }
  }
  expect_failures = [terraform_data.one_run]
}
