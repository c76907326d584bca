# Where it runs and where its bytes are: network, buckets, keys.

variable "bucket" {
  description = "An existing bucket, in the same region, for checkpoints and code. It is used as it is: its policy and its rules stay yours. Of one that the same configuration makes, pass a name that a plan knows (aws_s3_bucket.x.bucket), or module.x.name of ./bucket. Null: a new one."
  type        = string
  default     = null

  validation {
    condition     = var.bucket == null || can(regex("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", var.bucket))
    error_message = "bucket: the plain name of a bucket, without s3:// and without a path."
  }
}

variable "bucket_prefix" {
  description = "Where in the bucket the checkpoints are: the store is s3://BUCKET/BUCKET_PREFIX, the run a folder in it."
  type        = string
  default     = "checkpoints"

  validation {
    condition     = can(regex("^[A-Za-z0-9_][A-Za-z0-9_.=+-]*(/[A-Za-z0-9_][A-Za-z0-9_.=+-]*)*$", var.bucket_prefix)) && !can(regex("^sources(/|$)", var.bucket_prefix))
    error_message = "bucket_prefix: folders of letters, digits and _.=+-, without a slash at either end; \"sources\" is taken by the code."
  }
}

variable "delete_checkpoints" {
  description = "Whether terraform destroy deletes the new bucket with all checkpoints in it. Apply it before the destroy. A given bucket is never deleted."
  type        = bool
  default     = false
}

variable "kms_key_arn" {
  description = "A KMS key of the same region that encrypts the new bucket, or encrypts the given one already. The nodes' role may use it, where the key's own policy leaves that to IAM. Null: keys of S3's own (SSE-S3)."
  type        = string
  default     = null

  validation {
    condition     = var.kms_key_arn == null || can(regex("^arn:[a-z-]+:kms:[a-z0-9-]+:[0-9]{12}:key/[A-Za-z0-9-]+$", var.kms_key_arn))
    error_message = "kms_key_arn: the ARN of a key (not of an alias): arn:aws:kms:REGION:ACCOUNT:key/ID."
  }
}

variable "data_bucket_arns" {
  description = "ARNs of buckets that the program reads its data from."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for arn in var.data_bucket_arns : can(regex("^arn:[a-z-]+:s3:::[a-z0-9.-]+$", arn))])
    error_message = "data_bucket_arns: ARNs of whole buckets, such as arn:aws:s3:::my-data."
  }
}

variable "vpc_id" {
  description = "The VPC. Null: the default one of the region."
  type        = string
  default     = null
}

variable "subnet_ids" {
  description = "Subnets of the VPC, best in every availability zone: each is more capacity. They need a way to the internet. Empty: all of the VPC."
  type        = list(string)
  default     = []
}

variable "s3_gateway_endpoint" {
  description = "Whether to add a gateway endpoint for S3 to all route tables of the VPC. It is free, and keeps checkpoints off a NAT gateway; but adding it, and destroying it, breaks open connections of everybody in that VPC to S3, and changes the addresses that they come from. Only for a VPC that is yours alone, and has none: AWS refuses a second."
  type        = bool
  default     = false
}
