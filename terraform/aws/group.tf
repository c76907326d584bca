# The fleet: a group that keeps so many nodes alive, in whatever pool is cheap and deep enough.

resource "aws_autoscaling_group" "this" {
  #checkov:skip=CKV_AWS_315: it has a launch template, in its mixed instances policy
  name                = local.name
  min_size            = 0 # below it, neither a node nor an alarm could stop the fleet
  desired_capacity    = var.desired_capacity
  max_size            = var.max_size
  vpc_zone_identifier = local.subnet_ids
  placement_group     = one(aws_placement_group.this[*].name)
  capacity_rebalance  = var.capacity_rebalance

  health_check_type         = "EC2"
  health_check_grace_period = 60

  suspended_processes = ["AZRebalance"] # a training is not ended to make zones even
  enabled_metrics     = ["GroupDesiredCapacity", "GroupTotalInstances", "GroupPendingInstances"]

  wait_for_capacity_timeout = "0" # spot capacity comes when it comes

  mixed_instances_policy {
    instances_distribution {
      on_demand_base_capacity                  = 0
      on_demand_percentage_above_base_capacity = var.on_demand_percentage
      spot_allocation_strategy                 = var.allocation_strategy
      spot_max_price                           = var.max_usd_per_hour == null ? null : tostring(var.max_usd_per_hour)
    }

    launch_template {
      launch_template_specification {
        launch_template_id = aws_launch_template.node.id
        version            = aws_launch_template.node.latest_version
      }

      dynamic "override" {
        for_each = local.instance_types
        content {
          instance_type = override.value
        }
      }

      dynamic "override" {
        for_each = local.by_requirements ? [var.instance_requirements] : []
        content {
          instance_requirements {
            accelerator_types         = ["gpu"]
            accelerator_manufacturers = ["nvidia"]
            accelerator_names         = length(override.value.gpu_names) > 0 ? override.value.gpu_names : null
            local_storage             = var.require_nvme ? "required" : "included"
            local_storage_types       = var.require_nvme ? ["ssd"] : null

            accelerator_count {
              min = override.value.gpu_count
              max = override.value.gpu_count
            }
            accelerator_total_memory_mib {
              min = ceil(override.value.gpu_memory_gib * 1024)
            }
            vcpu_count {
              min = override.value.vcpus
            }
            memory_mib {
              min = ceil(override.value.memory_gib * 1024)
            }
          }
        }
      }
    }
  }

  # What is applied takes effect now, and not at the next interruption: the node makes its last step durable, and another
  # one goes on from there with the new code. An apply that changes nothing of a node leaves it alone.
  instance_refresh {
    strategy = "Rolling"
    preferences {
      min_healthy_percentage = 0
      skip_matching          = true
    }
  }

  # An instance counts as in service once it has taken the run over: until then, what it is to replace trains on.
  initial_lifecycle_hook {
    name                 = local.launch_hook
    lifecycle_transition = "autoscaling:EC2_INSTANCE_LAUNCHING"
    default_result       = "ABANDON" # ended, and another is started: `never_ready` counts them
    heartbeat_timeout    = var.launch_timeout_s
  }

  # Part of the group, so that it is still there when a destroy ends the nodes: they drain first.
  initial_lifecycle_hook {
    name                 = local.hook
    lifecycle_transition = "autoscaling:EC2_INSTANCE_TERMINATING"
    default_result       = "CONTINUE" # whoever does not answer is ended all the same
    heartbeat_timeout    = var.hook_timeout_s
  }

  dynamic "tag" {
    for_each = local.instance_tags
    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }

  timeouts {
    delete = "30m" # a node may be making its last snapshot durable
  }

  lifecycle {
    replace_triggered_by = [terraform_data.hook_timeout] # AWS's provider sets the hook only with a new group
  }

  # What a node needs to drain outlives the group.
  depends_on = [
    aws_iam_role_policy.node,
    aws_vpc_security_group_egress_rule.anywhere,
    aws_vpc_security_group_egress_rule.between_nodes,
    aws_vpc_security_group_ingress_rule.between_nodes,
    aws_vpc_endpoint.s3,
  ]
}

resource "terraform_data" "hook_timeout" {
  input = [var.hook_timeout_s, var.launch_timeout_s]
}

resource "aws_placement_group" "this" {
  count    = var.placement_group ? 1 : 0
  name     = local.name
  strategy = "cluster"
  tags     = local.tags
}
