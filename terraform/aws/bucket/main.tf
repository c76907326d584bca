# A bucket for checkpoints. A module of its own, so that `terraform state rm module.fleet.module.bucket` lets go of all of
# it at once: bucket, policy and rules stay as they are when the fleet is destroyed. Several runs may share one.

resource "aws_s3_bucket" "this" {
  #checkov:skip=CKV_AWS_18: access logs of every part of every checkpoint cost more than they tell; CloudTrail's data events can be turned on where they are wanted
  #checkov:skip=CKV_AWS_21: objects are never overwritten, and what is deleted is what retention has chosen; old versions would keep it for money
  #checkov:skip=CKV_AWS_144: a checkpoint is worth one region's durability; a copy elsewhere costs its transfer
  #checkov:skip=CKV_AWS_145: SSE-S3 unless kms_key_arn is given; a key of one's own has a price and a request quota
  #checkov:skip=CKV2_AWS_62: nobody waits for the events of this bucket
  bucket_prefix = var.name_prefix
  force_destroy = var.delete_checkpoints
  tags          = var.tags
}

resource "aws_s3_bucket_ownership_controls" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    object_ownership = "BucketOwnerEnforced" # no ACLs
  }
}

resource "aws_s3_bucket_public_access_block" "this" {
  bucket = aws_s3_bucket.this.id

  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_server_side_encryption_configuration" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    bucket_key_enabled = var.kms_key_arn != null # one request to KMS for many objects

    apply_server_side_encryption_by_default {
      sse_algorithm     = var.kms_key_arn == null ? "AES256" : "aws:kms"
      kms_master_key_id = var.kms_key_arn
    }
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    id     = "abort-unfinished-uploads" # each instance that dies in an upload leaves parts, which cost like objects
    status = "Enabled"
    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = 7
    }
  }
}

resource "aws_s3_bucket_policy" "this" {
  bucket     = aws_s3_bucket.this.id
  depends_on = [aws_s3_bucket_public_access_block.this]

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "OnlyWithTls"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3:*"
        Resource  = [aws_s3_bucket.this.arn, "${aws_s3_bucket.this.arn}/*"]
        Condition = { Bool = { "aws:SecureTransport" = "false" } }
      },
      {
        # A commit is a put-if-absent and nothing else. The harness keeps to that; this keeps everybody to it, a bug and a
        # stray `aws s3 cp` too. The second condition is AWS's way to leave out what takes no such header: beginning a
        # multipart upload, and its parts. Its completion needs the header again.
        Sid       = "OnlyPutIfAbsent"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3:PutObject"
        Resource = [
          for records in ["generations", "commits", "quarantine"] :
          "${aws_s3_bucket.this.arn}/${var.checkpoints}/*/${records}/*"
        ]
        Condition = {
          Null = { "s3:if-none-match" = "true" }
          Bool = { "s3:ObjectCreationOperation" = "true" }
        }
      },
    ]
  })
}
