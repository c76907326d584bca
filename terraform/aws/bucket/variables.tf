variable "name_prefix" {
  description = "What the bucket's name begins with; AWS adds a random ending."
  type        = string
}

variable "checkpoints" {
  description = "Folder of the checkpoints of all runs; the rules for commits hold below it."
  type        = string
  default     = "checkpoints"
}

variable "delete_checkpoints" {
  description = "Whether a destroy deletes the objects too."
  type        = bool
  default     = false
}

variable "kms_key_arn" {
  description = "A KMS key for all objects; null: SSE-S3."
  type        = string
  default     = null
}

variable "tags" {
  description = "Tags of the bucket."
  type        = map(string)
  default     = {}
}
