# A real interruption, on demand: AWS Fault Injection Service gives one spot instance of this run its two minutes.

resource "aws_fis_experiment_template" "drill" {
  count       = var.enable_drill ? 1 : 0
  description = "Interrupt one spot instance of the run ${var.run}"
  role_arn    = aws_iam_role.drill[0].arn

  action {
    name      = "interrupt"
    action_id = "aws:ec2:send-spot-instance-interruptions"

    parameter {
      key   = "durationBeforeInterruption"
      value = "PT2M"
    }

    target {
      key   = "SpotInstances"
      value = "node"
    }
  }

  target {
    name           = "node"
    resource_type  = "aws:ec2:spot-instance"
    selection_mode = "COUNT(1)"

    resource_tag {
      key   = "harness-run"
      value = var.run
    }

    filter {
      path   = "State.Name"
      values = ["running"]
    }
  }

  stop_condition {
    source = "none" # an interruption that was announced cannot be taken back
  }

  tags = merge(local.tags, { Name = "${local.name}-drill" })
}

resource "aws_iam_role" "drill" {
  count       = var.enable_drill ? 1 : 0
  name        = "${local.global_name}-drill"
  description = "Interrupts spot instances of the run ${var.run}"
  tags        = local.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "fis.amazonaws.com" }
      Condition = { StringEquals = { "aws:SourceAccount" = local.account } }
    }]
  })
}

resource "aws_iam_role_policy" "drill" {
  count = var.enable_drill ? 1 : 0
  name  = "interrupt"
  role  = aws_iam_role.drill[0].id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "InterruptThisRun"
        Effect    = "Allow"
        Action    = "ec2:SendSpotInstanceInterruptions"
        Resource  = "arn:${local.partition}:ec2:${local.region}:${local.account}:instance/*"
        Condition = { StringEquals = { "aws:ResourceTag/harness-run" = var.run } }
      },
      {
        Sid      = "FindInstances" # AWS knows no narrower resource for this action
        Effect   = "Allow"
        Action   = "ec2:DescribeInstances"
        Resource = "*"
      },
    ]
  })
}
