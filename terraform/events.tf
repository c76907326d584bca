# What happens to the fleet, told by AWS: to the topic, for people, and to the log, for afterwards.

resource "aws_sns_topic" "this" {
  #checkov:skip=CKV_AWS_26: alarms and rules cannot publish through SNS's own key, and the messages hold no secret
  name = local.name
}

resource "aws_sns_topic_policy" "this" {
  arn = aws_sns_topic.this.arn

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "Rules" # EventBridge's manual has no condition here
        Effect    = "Allow"
        Principal = { Service = "events.amazonaws.com" }
        Action    = "sns:Publish"
        Resource  = aws_sns_topic.this.arn
      },
      {
        Sid       = "AlarmsAndBudgets"
        Effect    = "Allow"
        Principal = { Service = ["cloudwatch.amazonaws.com", "budgets.amazonaws.com"] }
        Action    = "sns:Publish"
        Resource  = aws_sns_topic.this.arn
        Condition = { StringEquals = { "aws:SourceAccount" = local.account } }
      },
    ]
  })
}

resource "aws_sns_topic_subscription" "email" {
  count     = var.notify_email == null ? 0 : 1
  topic_arn = aws_sns_topic.this.arn
  protocol  = "email"
  endpoint  = var.notify_email
}

resource "aws_cloudwatch_log_group" "this" {
  #checkov:skip=CKV_AWS_158: encrypted with the key of CloudWatch Logs; a key of one's own is a matter of the account
  #checkov:skip=CKV_AWS_338: a training's log is of interest for weeks; the run's journal in the bucket stays
  name              = "/harness/${var.run}"
  retention_in_days = 30
}

resource "aws_cloudwatch_log_resource_policy" "events" {
  policy_name = local.name

  policy_document = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Service = ["events.amazonaws.com", "delivery.logs.amazonaws.com"] }
      Action    = ["logs:CreateLogStream", "logs:PutLogEvents"]
      Resource  = "${aws_cloudwatch_log_group.this.arn}:*"
    }]
  })
}

locals {
  # EC2's own events name an instance and nothing else: no pattern can tell ours from others of the account. Those of the
  # group can be told apart. So the group's events are what people get of starts and ends; EC2's go to the log.
  rules = {
    interruption = {
      description = "a spot instance (of this account and region) will be taken away in two minutes"
      notify      = true
      pattern     = { source = ["aws.ec2"], detail-type = ["EC2 Spot Instance Interruption Warning"] }
    }
    rebalance = {
      description = "AWS recommends to leave a spot instance (of this account and region)"
      notify      = true
      pattern     = { source = ["aws.ec2"], detail-type = ["EC2 Instance Rebalance Recommendation"] }
    }
    state = {
      description = "an instance (of this account and region) stops or ends"
      notify      = false
      pattern = {
        source      = ["aws.ec2"]
        detail-type = ["EC2 Instance State-change Notification"]
        detail      = { state = ["stopping", "stopped", "shutting-down", "terminated"] }
      }
    }
    launch = {
      description = "an instance of the run ${var.run} was launched; the alarm never-ready counts them"
      notify      = false
      pattern = {
        source      = ["aws.autoscaling"]
        detail-type = ["EC2 Instance-launch Lifecycle Action"]
        detail      = { AutoScalingGroupName = [local.name] }
      }
    }
    group = {
      description = "the group of the run ${var.run} has started or ended an instance, or could not"
      notify      = true
      pattern = {
        source = ["aws.autoscaling"]
        detail-type = [
          "EC2 Instance Launch Successful", "EC2 Instance Launch Unsuccessful",
          "EC2 Instance Terminate Successful", "EC2 Instance Terminate Unsuccessful",
        ]
        detail = { AutoScalingGroupName = [local.name] }
      }
    }
  }
}

resource "aws_cloudwatch_event_rule" "this" {
  for_each      = local.rules
  name          = "${local.name}-${each.key}"
  description   = each.value.description
  event_pattern = jsonencode(each.value.pattern)
}

resource "aws_cloudwatch_event_target" "topic" {
  for_each  = { for name, rule in local.rules : name => rule if rule.notify }
  rule      = aws_cloudwatch_event_rule.this[each.key].name
  target_id = "topic"
  arn       = aws_sns_topic.this.arn
}

resource "aws_cloudwatch_event_target" "log" {
  for_each  = local.rules
  rule      = aws_cloudwatch_event_rule.this[each.key].name
  target_id = "log"
  arn       = aws_cloudwatch_log_group.this.arn
}
