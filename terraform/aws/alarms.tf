# What must not go unnoticed: no progress that would outlive an instance, and a program that does not stay up.

resource "aws_cloudwatch_metric_alarm" "durable_age" {
  alarm_name          = "${local.name}-durable-age"
  alarm_description   = "Run ${var.run}: no snapshot has become durable for ${var.durable_age_alarm_s} s, or nobody says so, though instances are wanted. Is there spot capacity? What does the log say?"
  alarm_actions       = [aws_sns_topic.this.arn]
  ok_actions          = [aws_sns_topic.this.arn]
  comparison_operator = "GreaterThanThreshold"
  threshold           = var.durable_age_alarm_s
  evaluation_periods  = 3 # a replacement boots in less
  treat_missing_data  = "breaching"
  tags                = local.tags

  metric_query {
    id          = "judged"
    label       = "age of the newest durable snapshot, in seconds"
    expression  = "IF(FILL(desired, 0) > 0, FILL(age, 86400), 0)" # silence counts as a day; a stopped fleet as 0
    return_data = true
  }

  metric_query {
    id = "age"
    metric {
      namespace   = local.metrics
      metric_name = "DurableAgeSeconds"
      dimensions  = { Run = var.run }
      stat        = "Minimum" # of two nodes that hand over, the one that is ahead
      period      = 300
    }
  }

  metric_query {
    id = "desired"
    metric {
      namespace   = "AWS/AutoScaling"
      metric_name = "GroupDesiredCapacity"
      dimensions  = { AutoScalingGroupName = aws_autoscaling_group.this.name }
      stat        = "Maximum"
      period      = 300
    }
  }
}

resource "aws_cloudwatch_metric_alarm" "crash_loop" {
  alarm_name          = "${local.name}-crash-loop"
  alarm_description   = "Run ${var.run}: started more than ${var.crash_loop_starts} times in an hour. Either interruptions are very frequent, or it crashes."
  alarm_actions       = [aws_sns_topic.this.arn]
  comparison_operator = "GreaterThanThreshold"
  threshold           = var.crash_loop_starts
  evaluation_periods  = 1
  treat_missing_data  = "notBreaching"

  namespace   = local.metrics
  metric_name = "Starts"
  dimensions  = { Run = var.run }
  statistic   = "Sum"
  period      = 3600
  tags        = local.tags
}

resource "aws_cloudwatch_metric_alarm" "failed_starts" {
  alarm_name          = "${local.name}-failed-starts"
  alarm_description   = "Run ${var.run}: the program ended in failure. After some more without progress the fleet stops itself."
  alarm_actions       = [aws_sns_topic.this.arn]
  comparison_operator = "GreaterThanOrEqualToThreshold"
  threshold           = 1
  evaluation_periods  = 1
  treat_missing_data  = "notBreaching"

  namespace   = local.metrics
  metric_name = "FailedStarts"
  dimensions  = { Run = var.run }
  statistic   = "Sum"
  period      = 300
  tags        = local.tags
}
