# What a node may do. The S3 part is the table "IAM actions" of docs/operations.md, and nothing else.

resource "aws_iam_role" "node" {
  name        = local.global_name
  description = "Nodes of the run ${var.run}"
  tags        = local.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "ec2.${data.aws_partition.current.dns_suffix}" }
    }]
  })
}

resource "aws_iam_instance_profile" "node" {
  name = local.global_name
  role = aws_iam_role.node.name
  tags = local.tags
}

resource "aws_iam_role_policy" "node" {
  name = "run"
  role = aws_iam_role.node.id

  policy = jsonencode({
    Version   = "2012-10-17"
    Statement = concat(local.may_checkpoint, local.may_read, local.may_encrypt, local.may_read_secrets, local.may_steer_the_group, local.may_tell, local.may_open_a_shell, local.may_pull)
  })
}

locals {
  may_checkpoint = [
    {
      Sid      = "WriteAndRead"
      Effect   = "Allow"
      Action   = ["s3:PutObject", "s3:GetObject"]
      Resource = "${local.run_objects}/*"
    },
    {
      Sid       = "List"
      Effect    = "Allow"
      Action    = "s3:ListBucket"
      Resource  = local.bucket_arn
      Condition = { StringLike = { "s3:prefix" = "${var.bucket_prefix}/${var.run}/*" } }
    },
    {
      # Never generations/ and events/: who started when, and what happened, outlives every node.
      Sid      = "Retire"
      Effect   = "Allow"
      Action   = "s3:DeleteObject"
      Resource = [for folder in ["snapshots", "commits", "quarantine"] : "${local.run_objects}/${folder}/*"]
    },
    {
      Sid      = "GoOnWithUploads"
      Effect   = "Allow"
      Action   = ["s3:ListMultipartUploadParts", "s3:AbortMultipartUpload"]
      Resource = "${local.run_objects}/snapshots/*"
    },
    {
      # The last two are asked by `harness doctor`.
      Sid      = "FindUploadsAndRules"
      Effect   = "Allow"
      Action   = ["s3:ListBucketMultipartUploads", "s3:GetLifecycleConfiguration", "s3:GetEncryptionConfiguration"]
      Resource = local.bucket_arn
    },
  ]

  readable = concat(
    ["${local.bucket_arn}/sources/${var.run}/*"],
    [for address in local.s3_addresses : "arn:${local.partition}:s3:::${address[0]}/${address[1]}"],
    [for arn in var.data_bucket_arns : "${arn}/*"],
  )

  may_read = concat(
    length(local.readable) == 0 ? [] : [{
      Sid      = "ReadCodeAndData"
      Effect   = "Allow"
      Action   = "s3:GetObject"
      Resource = local.readable
    }],
    length(var.data_bucket_arns) == 0 ? [] : [{
      Sid      = "ListData"
      Effect   = "Allow"
      Action   = "s3:ListBucket"
      Resource = var.data_bucket_arns
    }],
  )

  may_encrypt = var.kms_key_arn == null ? [] : [{
    Sid      = "Encrypt"
    Effect   = "Allow"
    Action   = ["kms:GenerateDataKey", "kms:Decrypt"]
    Resource = var.kms_key_arn
  }]

  # A secret's ARN, without the key of ECS's form.
  parameters     = [for arn in values(var.secrets) : arn if can(regex(":ssm:", arn))]
  vault_secrets  = [for arn in values(var.secrets) : join(":", slice(split(":", arn), 0, 7)) if can(regex(":secretsmanager:", arn))]
  secret_regions = distinct([for arn in values(var.secrets) : split(":", arn)[3]])

  may_read_secrets = concat(
    length(local.parameters) == 0 ? [] : [{
      Sid      = "ReadParameters"
      Effect   = "Allow"
      Action   = "ssm:GetParameter"
      Resource = distinct(local.parameters)
    }],
    length(local.vault_secrets) == 0 ? [] : [{
      Sid      = "ReadSecrets"
      Effect   = "Allow"
      Action   = "secretsmanager:GetSecretValue"
      Resource = distinct(local.vault_secrets)
    }],
    var.secrets_kms_key_arn == null ? [] : [{
      Sid       = "DecryptSecrets"
      Effect    = "Allow"
      Action    = "kms:Decrypt"
      Resource  = var.secrets_kms_key_arn
      Condition = { StringEquals = { "kms:ViaService" = flatten([for region in local.secret_regions : ["ssm.${region}.amazonaws.com", "secretsmanager.${region}.amazonaws.com"]]) } }
    }],
  )

  may_steer_the_group = [
    {
      Sid    = "SteerOwnGroup"
      Effect = "Allow"
      Action = [
        "autoscaling:CompleteLifecycleAction",
        "autoscaling:RecordLifecycleActionHeartbeat",
        "autoscaling:SetDesiredCapacity",
        "autoscaling:SetInstanceHealth",
        "autoscaling:SetInstanceProtection",
        "autoscaling:TerminateInstanceInAutoScalingGroup",
      ]
      Resource = local.group_arn
    },
    {
      Sid      = "SeeGroups" # AWS knows no narrower resource for this action
      Effect   = "Allow"
      Action   = "autoscaling:DescribeAutoScalingGroups"
      Resource = "*"
    },
  ]

  may_tell = [
    {
      Sid      = "Notify"
      Effect   = "Allow"
      Action   = "sns:Publish"
      Resource = aws_sns_topic.this.arn
    },
    {
      Sid       = "Measure" # nor for this one: the namespace is the limit
      Effect    = "Allow"
      Action    = "cloudwatch:PutMetricData"
      Resource  = "*"
      Condition = { StringEquals = { "cloudwatch:namespace" = local.metrics } }
    },
    {
      Sid      = "Log"
      Effect   = "Allow"
      Action   = ["logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"]
      Resource = "${aws_cloudwatch_log_group.this.arn}:*"
    },
  ]

  # A shell without an inbound port: what Session Manager's agent needs. AWS's own policy for it, AmazonSSMManagedInstanceCore,
  # would let a node read every parameter of the account, secrets too.
  may_open_a_shell = [{
    Sid    = "SessionManager" # AWS knows no narrower resource for these actions
    Effect = "Allow"
    Action = [
      "ssm:UpdateInstanceInformation",
      "ssmmessages:CreateControlChannel",
      "ssmmessages:CreateDataChannel",
      "ssmmessages:OpenControlChannel",
      "ssmmessages:OpenDataChannel",
    ]
    Resource = "*"
  }]

  # container_image in ECR: account, region, and repository without tag and digest
  ecr = try([regex("^([0-9]{12})\\.dkr\\.ecr\\.([a-z0-9-]+)\\.amazonaws\\.com[a-z.]*/([^:@]+)", var.container_image)], [])

  may_pull = flatten([for image in local.ecr : [
    {
      Sid      = "LogInToEcr"
      Effect   = "Allow"
      Action   = "ecr:GetAuthorizationToken"
      Resource = "*"
    },
    {
      Sid      = "PullImage"
      Effect   = "Allow"
      Action   = ["ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
      Resource = "arn:${local.partition}:ecr:${image[1]}:${image[0]}:repository/${image[2]}"
    },
  ]])
}
