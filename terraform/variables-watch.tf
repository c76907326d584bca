# Who is told what, and when.

variable "notify_email" {
  description = "An address that the notices go to. AWS asks it to confirm first. Null: subscribe to the topic yourself."
  type        = string
  default     = null

  validation {
    condition     = var.notify_email == null || can(regex("^[^@[:space:]]+@[^@[:space:]]+$", var.notify_email))
    error_message = "notify_email: an e-mail address."
  }
}

variable "durable_age_alarm_s" {
  description = "Alarm when the newest durable snapshot is older than this while instances are wanted. Well above durable_every_s (300 s) and the time that a replacement needs."
  type        = number
  default     = 1800

  validation {
    condition     = var.durable_age_alarm_s >= 60 && var.durable_age_alarm_s < 86400
    error_message = "durable_age_alarm_s: from 60 s to a day."
  }
}

variable "crash_loop_starts" {
  description = "Alarm at more starts in an hour than this."
  type        = number
  default     = 6

  validation {
    condition     = var.crash_loop_starts >= 1
    error_message = "crash_loop_starts: 1 or more."
  }
}

variable "budget_usd" {
  description = "Notify at 80 % of so many dollars in a month, and when 100 % is forecast. It counts the whole account: a filter by tag sees nothing until the tag is activated for billing. Null: no budget."
  type        = number
  default     = null

  validation {
    condition     = var.budget_usd == null ? true : var.budget_usd > 0
    error_message = "budget_usd: more than 0."
  }
}

variable "enable_drill" {
  description = "Whether to make a template of AWS Fault Injection Service that interrupts one spot instance of this run."
  type        = bool
  default     = false
}

variable "tags" {
  description = "More tags for everything that is made here."
  type        = map(string)
  default     = {}

  validation {
    condition     = length(setintersection(keys(var.tags), ["Name", "harness-run", "harness-store", "harness-command"])) == 0
    error_message = "tags: Name and harness-… are set here."
  }
}
