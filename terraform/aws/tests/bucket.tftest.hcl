# The bucket: nobody overwrites a commit, nobody reads it in the open, and it outlives the fleet.

mock_provider "aws" {
  source = "./tests/account"
}

variables {
  name_prefix        = "harness-gpt-"
  checkpoints        = "checkpoints"
  delete_checkpoints = false
  kms_key_arn        = null
  tags               = {}
}

run "closed_encrypted_tidy_and_a_commit_is_put_if_absent_or_nothing" {
  module {
    source = "./bucket"
  }
  assert {
    condition = jsondecode(aws_s3_bucket_policy.this.policy).Statement[1] == {
      Sid       = "OnlyPutIfAbsent"
      Effect    = "Deny"
      Principal = "*"
      Action    = "s3:PutObject"
      Resource = [
        "arn:aws:s3:::new-bucket/checkpoints/*/generations/*",
        "arn:aws:s3:::new-bucket/checkpoints/*/commits/*",
        "arn:aws:s3:::new-bucket/checkpoints/*/quarantine/*",
      ]
      Condition = {
        Null = { "s3:if-none-match" = "true" }
        Bool = { "s3:ObjectCreationOperation" = "true" }
      }
    }
    error_message = "the records of every run, and nothing else of the bucket"
  }
  assert {
    condition     = jsondecode(aws_s3_bucket_policy.this.policy).Statement[0].Condition == { Bool = { "aws:SecureTransport" = "false" } }
    error_message = "TLS only"
  }
  assert {
    condition = (
      aws_s3_bucket_public_access_block.this.block_public_acls && aws_s3_bucket_public_access_block.this.block_public_policy &&
      aws_s3_bucket_public_access_block.this.ignore_public_acls && aws_s3_bucket_public_access_block.this.restrict_public_buckets
    )
    error_message = "never public"
  }
  assert {
    condition     = one(aws_s3_bucket_ownership_controls.this.rule).object_ownership == "BucketOwnerEnforced"
    error_message = "no ACLs"
  }
  assert {
    condition     = one(one(aws_s3_bucket_server_side_encryption_configuration.this.rule).apply_server_side_encryption_by_default).sse_algorithm == "AES256"
    error_message = "encrypted"
  }
  assert {
    condition     = one(one(aws_s3_bucket_lifecycle_configuration.this.rule).abort_incomplete_multipart_upload).days_after_initiation == 7
    error_message = "parts of dead uploads go"
  }
  assert {
    condition     = aws_s3_bucket.this.force_destroy == false
    error_message = "a destroy keeps checkpoints"
  }
}

run "a_key_of_ones_own_and_a_bucket_that_may_go" {
  module {
    source = "./bucket"
  }
  variables {
    kms_key_arn        = "arn:aws:kms:us-east-1:123456789012:key/abc"
    delete_checkpoints = true
  }
  assert {
    condition     = one(one(aws_s3_bucket_server_side_encryption_configuration.this.rule).apply_server_side_encryption_by_default).kms_master_key_id == "arn:aws:kms:us-east-1:123456789012:key/abc"
    error_message = "the key"
  }
  assert {
    condition     = aws_s3_bucket.this.force_destroy
    error_message = "told otherwise"
  }
}
