# An account that the tests pretend to have: what AWS would answer.

mock_data "aws_partition" {
  defaults = { partition = "aws", dns_suffix = "amazonaws.com" }
}

mock_data "aws_caller_identity" {
  defaults = { account_id = "123456789012" }
}

mock_data "aws_availability_zones" {
  defaults = { id = "us-east-1", zone_ids = ["use1-az2", "use1-az1"] }
}

mock_data "aws_vpc" {
  defaults = { id = "vpc-1" }
}

mock_data "aws_subnets" {
  defaults = { ids = ["subnet-2", "subnet-1"] }
}

mock_data "aws_route_tables" {
  defaults = { ids = ["rtb-1"] }
}

mock_data "aws_ec2_instance_types" {
  defaults = { instance_types = ["g5.xlarge", "g6.xlarge", "m5.large", "g5g.xlarge"] }
}

mock_data "aws_ec2_instance_type" {
  defaults = { instance_storage_supported = true, efa_supported = true, supported_architectures = ["x86_64"] }
}

mock_data "aws_ssm_parameter" {
  defaults = { insecure_value = "ami-00000000000000001" }
}

mock_data "aws_ami" {
  defaults = {
    id               = "ami-00000000000000001"
    architecture     = "x86_64"
    root_device_name = "/dev/sda1"
    block_device_mappings = [
      { device_name = "/dev/sda1", ebs = { volume_size = "65" } },
      { device_name = "/dev/sdb", virtual_name = "ephemeral0" },
    ]
  }
}

mock_data "aws_s3_bucket" {
  defaults = { id = "given-bucket", bucket_regional_domain_name = "given-bucket.s3.us-east-1.amazonaws.com" }
}

mock_resource "aws_s3_bucket" {
  defaults = { id = "new-bucket", arn = "arn:aws:s3:::new-bucket" }
}

mock_resource "aws_sns_topic" {
  defaults = { arn = "arn:aws:sns:us-east-1:123456789012:harness-gpt" }
}

mock_resource "aws_cloudwatch_log_group" {
  defaults = { arn = "arn:aws:logs:us-east-1:123456789012:log-group:/harness/gpt" }
}

mock_resource "aws_iam_role" {
  defaults = { arn = "arn:aws:iam::123456789012:role/harness-gpt" }
}

mock_resource "aws_iam_instance_profile" {
  defaults = { arn = "arn:aws:iam::123456789012:instance-profile/harness-gpt" }
}

mock_resource "aws_launch_template" {
  defaults = { id = "lt-0123456789abcdef0", latest_version = 7 }
}

mock_resource "aws_placement_group" {
  defaults = { name = "harness-gpt" }
}

mock_resource "aws_autoscaling_policy" {
  defaults = { arn = "arn:aws:autoscaling:us-east-1:123456789012:scalingPolicy:11111111-2222-3333-4444-555555555555:autoScalingGroupName/harness-gpt:policyName/stop" }
}
