# What happens to the fleet, told by AWS: to the topic, as mails that a person can read. The group keeps what it did for
# six weeks: `terraform output next`.

resource "aws_sns_topic" "this" {
  #checkov:skip=CKV_AWS_26: alarms and rules cannot publish through SNS's own key, and the messages hold no secret
  name = local.name
  tags = local.tags
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
  tags              = local.tags
}

locals {
  # EC2's own events name an instance and nothing else: no pattern can tell ours from others of the account. Those of the
  # group can be told apart. `paths` are parts of an event, by the names that `mail` uses.
  rules = {
    interruption = {
      description = "a spot instance (of this account and region) will be taken away in two minutes"
      pattern     = { source = ["aws.ec2"], detail-type = ["EC2 Spot Instance Interruption Warning"] }
      paths       = { instance = "$.detail.instance-id", time = "$.time" }
      mail        = "<time>: AWS takes the spot instance <instance> away in two minutes. If it trains the run ${var.run} (the events of AWS name no run), its newest step becomes durable, and the group starts another instance."
    }
    rebalance = {
      description = "AWS recommends to leave a spot instance (of this account and region)"
      pattern     = { source = ["aws.ec2"], detail-type = ["EC2 Instance Rebalance Recommendation"] }
      paths       = { instance = "$.detail.instance-id", time = "$.time" }
      mail        = "<time>: AWS expects to take the spot instance <instance> away soon. The run ${var.run} goes on${var.capacity_rebalance ? "; if it is there, another instance takes it over" : ""}."
    }
    group = {
      description = "the group of the run ${var.run} has started or ended an instance, or could not"
      pattern = {
        source = ["aws.autoscaling"]
        detail-type = [
          "EC2 Instance Launch Successful", "EC2 Instance Launch Unsuccessful",
          "EC2 Instance Terminate Successful", "EC2 Instance Terminate Unsuccessful",
        ]
        detail = { AutoScalingGroupName = [local.name] }
      }
      paths = { what = "$.detail-type", instance = "$.detail.EC2InstanceId", why = "$.detail.Cause", time = "$.time" }
      mail  = "<time>: run ${var.run}, instance <instance>: <what>. <why>"
    }
  }
}

resource "aws_cloudwatch_event_rule" "this" {
  for_each      = local.rules
  name          = "${local.name}-${each.key}"
  description   = each.value.description
  event_pattern = jsonencode(each.value.pattern)
  tags          = local.tags
}

resource "aws_cloudwatch_event_target" "topic" {
  for_each  = local.rules
  rule      = aws_cloudwatch_event_rule.this[each.key].name
  target_id = "topic"
  arn       = aws_sns_topic.this.arn

  input_transformer {
    input_paths = each.value.paths
    # A JSON string. Not by jsonencode, which writes < as \u003c, and EventBridge replaces only a literal <name>. Neither
    # a mail nor the name of a run has a quote or a backslash.
    input_template = "\"${each.value.mail}\""
  }
}
