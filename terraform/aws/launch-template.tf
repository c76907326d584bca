# What an instance is: image, disk, network, role, metadata service, and the script that makes a node of it.

data "aws_ssm_parameter" "ami" {
  count = var.ami_id == null ? 1 : 0
  name  = var.ami_ssm_parameter
}

data "aws_ami" "node" {
  include_deprecated = true # one that was pinned is still there when it is no longer the newest

  filter {
    name   = "image-id"
    values = [var.ami_id == null ? data.aws_ssm_parameter.ami[0].insecure_value : var.ami_id]
  }
}

# The image stays the one of the first apply: with another PyTorch or driver a run may compute other bits from there on.
# For a newer image: terraform apply -replace='module.fleet.terraform_data.image[0]'
resource "terraform_data" "image" {
  count            = var.ami_id == null ? 1 : 0
  input            = data.aws_ami.node.id
  triggers_replace = var.ami_ssm_parameter

  lifecycle {
    ignore_changes = [input]
  }
}

resource "aws_launch_template" "node" {
  #checkov:skip=CKV_AWS_341: two hops, so that the metadata service, with its notices, is heard in a container with a network of its own
  name        = local.name
  description = "Nodes of the run ${var.run}"

  image_id  = var.ami_id == null ? terraform_data.image[0].output : var.ami_id
  user_data = local.user_data_gzip

  # A node that shuts itself down is gone, and not kept stopped on the bill of its volume.
  instance_initiated_shutdown_behavior = "terminate"
  update_default_version               = true
  vpc_security_group_ids               = var.efa ? null : [aws_security_group.node.id]
  tags                                 = local.tags

  iam_instance_profile {
    arn = aws_iam_instance_profile.node.arn
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required" # IMDSv2
    http_put_response_hop_limit = 2
    instance_metadata_tags      = "enabled" # resume.sh reads run, store and command there
  }

  block_device_mappings {
    device_name = data.aws_ami.node.root_device_name

    ebs {
      volume_type           = "gp3"
      volume_size           = var.root_volume_gb
      throughput            = var.root_volume_mb_s
      encrypted             = true
      delete_on_termination = true

      volume_initialization_rate = var.root_volume_fetch_mb_s
    }
  }

  dynamic "network_interfaces" {
    for_each = var.efa ? [1] : []
    content {
      interface_type        = "efa"
      device_index          = 0
      security_groups       = [aws_security_group.node.id]
      delete_on_termination = true
    }
  }

  monitoring {
    enabled = false # the run measures itself; EC2's own metrics each minute cost extra
  }

  dynamic "tag_specifications" {
    for_each = ["volume", "network-interface"] # the group tags the instances
    content {
      resource_type = tag_specifications.value
      tags          = merge(local.tags, { Name = local.name })
    }
  }

  depends_on = [aws_s3_object.script] # what the user data fetches

  lifecycle {
    precondition {
      condition = alltrue([
        for disk in data.aws_ami.node.block_device_mappings : var.root_volume_gb >= tonumber(disk.ebs.volume_size)
        if disk.device_name == data.aws_ami.node.root_device_name
      ])
      error_message = "root_volume_gb: ${var.root_volume_gb} GB is less than the root volume of the AMI ${data.aws_ami.node.id}, and no instance would start."
    }
    precondition {
      condition     = var.mix_gpu_memory || !local.gpus_differ
      error_message = "instance_types: the memory of their GPUs differs (${join(", ", distinct([for gib in local.gpu_memory : format("%.0f GiB", gib)]))}). A run that fits on the largest only would crash on the others, and stop the fleet. If it fits on all: mix_gpu_memory = true."
    }
    precondition {
      condition     = var.kms_key_arn == null ? true : split(":", var.kms_key_arn)[3] == local.region
      error_message = "kms_key_arn: a key of another region than ${local.region}, where the fleet and its bucket are. S3 cannot use it."
    }
    precondition {
      # EC2 counts the bytes before they are base64. Terraform shows the values that a condition names: so it names a number.
      condition     = local.user_data_bytes <= 16384
      error_message = "command, settings, setup_command: compressed, the user data has ${local.user_data_bytes} bytes, and EC2 takes 16384. Move setup_command into a script in the archive."
    }
  }
}
