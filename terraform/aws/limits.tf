# What stops a fleet that costs money for nothing, from outside of its instances: a node that never boots, cannot reach
# AWS or has died cannot stop anything.

# Step scaling, since simple scaling waits while an instance is being started or replaced: a fleet that boots again and
# again would never be stopped.
resource "aws_autoscaling_policy" "stop" {
  name                   = "stop"
  autoscaling_group_name = aws_autoscaling_group.this.name
  policy_type            = "StepScaling"
  adjustment_type        = "ExactCapacity"

  step_adjustment {
    metric_interval_lower_bound = "0"
    scaling_adjustment          = 0
  }
}

locals {
  # CloudWatch's alarms look back a day at most, with periods of an hour or more seven.
  stop_period_s = var.stop_after_s <= 86400 ? 900 : 3600

  # In SUM a series without a single value counts as nothing; FILL cannot fill it.
  is_paid_for = "(total > 0 AND wanted > 0)"
  no_progress = "IF(${local.is_paid_for} AND SUM([steps, 0 * total]) <= 0, 1, 0)"
  never_ready = "IF((pending > 0 AND wanted > 0) AND SUM([ready, 0 * pending]) <= 0, 1, 0)"

  # An alarm takes its action each minute while it is in ALARM. So it has to leave that state once the group wants
  # nothing, or it undoes the next apply: a period in which the group wanted nothing at any time is none to complain of.
  go_on = "it sets the group to zero each minute until it is OK again, as a rule within minutes, at most %d. Then: terraform apply."
}

resource "aws_cloudwatch_metric_alarm" "no_progress" {
  alarm_name          = "${local.name}-no-progress"
  alarm_description   = "Run ${var.run}: THE FLEET IS STOPPED. There were instances all the time for ${var.stop_after_s} s, and not one step has become durable. What does the log say? To go on, wait for this alarm: ${format(local.go_on, local.stop_period_s / 60)}"
  alarm_actions       = [aws_autoscaling_policy.stop.arn, aws_sns_topic.this.arn]
  comparison_operator = "GreaterThanOrEqualToThreshold"
  threshold           = 1
  evaluation_periods  = var.stop_after_s / local.stop_period_s
  datapoints_to_alarm = var.stop_after_s / local.stop_period_s
  treat_missing_data  = "notBreaching"
  tags                = local.tags

  metric_query {
    id          = "judged"
    label       = "1: instances, and no new durable step"
    expression  = local.no_progress
    return_data = true
  }

  metric_query {
    id = "total" # pending ones too; hours without capacity are hours without instances
    metric {
      namespace   = "AWS/AutoScaling"
      metric_name = "GroupTotalInstances"
      dimensions  = { AutoScalingGroupName = aws_autoscaling_group.this.name }
      stat        = "Maximum"
      period      = local.stop_period_s
    }
  }

  metric_query {
    id = "wanted"
    metric {
      namespace   = "AWS/AutoScaling"
      metric_name = "GroupDesiredCapacity"
      dimensions  = { AutoScalingGroupName = aws_autoscaling_group.this.name }
      stat        = "Minimum"
      period      = local.stop_period_s
    }
  }

  metric_query {
    id = "steps" # new ones; an age would begin anew with each instance
    metric {
      namespace   = local.metrics
      metric_name = "DurableSteps"
      dimensions  = { Run = var.run }
      stat        = "Sum"
      period      = local.stop_period_s
    }
  }
}

resource "aws_cloudwatch_metric_alarm" "never_ready" {
  alarm_name          = "${local.name}-never-ready"
  alarm_description   = "Run ${var.run}: THE FLEET IS STOPPED. Three launches in a row have not come to take the run over within ${var.launch_timeout_s} s. Is there a way to S3 and the packages? Is launch_timeout_s enough? To go on, wait for this alarm: ${format(local.go_on, local.launch_period_s / 60)}"
  alarm_actions       = [aws_autoscaling_policy.stop.arn, aws_sns_topic.this.arn]
  comparison_operator = "GreaterThanOrEqualToThreshold"
  threshold           = 1
  evaluation_periods  = 3
  datapoints_to_alarm = 3
  treat_missing_data  = "notBreaching"
  tags                = local.tags

  metric_query {
    id          = "judged"
    label       = "1: launches, and none that was ready"
    expression  = local.never_ready
    return_data = true
  }

  metric_query {
    id = "pending" # until its LAUNCHING hook is completed
    metric {
      namespace   = "AWS/AutoScaling"
      metric_name = "GroupPendingInstances"
      dimensions  = { AutoScalingGroupName = aws_autoscaling_group.this.name }
      stat        = "Maximum"
      period      = local.launch_period_s
    }
  }

  metric_query {
    id = "wanted"
    metric {
      namespace   = "AWS/AutoScaling"
      metric_name = "GroupDesiredCapacity"
      dimensions  = { AutoScalingGroupName = aws_autoscaling_group.this.name }
      stat        = "Minimum"
      period      = local.launch_period_s
    }
  }

  metric_query {
    id = "ready"
    metric {
      namespace   = local.metrics
      metric_name = "Ready"
      dimensions  = { Run = var.run }
      stat        = "Sum"
      period      = local.launch_period_s
    }
  }
}

locals {
  # Longer than a launch that fails: there is one in each period.
  launch_period_s = ceil((var.launch_timeout_s + 300) / 60) * 60
}

# When the fleet was applied first. Later applies do not move it.
resource "terraform_data" "began" {
  input = plantimestamp()

  lifecycle {
    ignore_changes = [input]
  }
}

locals {
  ends_at = timeadd(terraform_data.began.output, "${coalesce(var.max_hours, 0)}h")
  is_over = timecmp(plantimestamp(), local.ends_at) >= 0
}

resource "aws_autoscaling_schedule" "end" {
  count                  = var.max_hours == null ? 0 : 1
  scheduled_action_name  = "max-hours"
  autoscaling_group_name = aws_autoscaling_group.this.name

  # AWS forgets an action that is done, and takes no start in the past: ten years later it does no harm.
  start_time       = local.is_over ? timeadd(local.ends_at, "87600h") : local.ends_at
  desired_capacity = 0
  min_size         = 0
  max_size         = -1 # as it is

  lifecycle {
    precondition {
      condition     = var.desired_capacity == 0 || !local.is_over
      error_message = "max_hours: ${coalesce(var.max_hours, 0)} hours after the first apply are over. Raise max_hours to go on, or set desired_capacity = 0."
    }
  }
}
