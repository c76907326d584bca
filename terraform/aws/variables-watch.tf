# Who is told what, and when.

variable "notify_email" {
  description = "An address that the notices go to. AWS asks it to confirm first, and sends nothing before."
  type        = string
  default     = null

  validation {
    condition     = var.notify_email != null || var.without_notices
    error_message = "notify_email: an address that is told when the fleet stops, or costs money for nothing. To be told nothing, or to subscribe to the topic yourself: without_notices = true."
  }

  validation {
    condition     = var.notify_email == null || can(regex("^[^@[:space:]]+@[^@[:space:]]+$", var.notify_email))
    error_message = "notify_email: an e-mail address."
  }
}

variable "without_notices" {
  description = "Whether there may be no notify_email: nobody is told anything, unless you subscribe to the topic yourself."
  type        = bool
  default     = false
}

variable "stop_after_s" {
  description = "Stop the fleet when there were instances for so long, and not one new step has become durable. Well above a boot, the time that a first start fetches data, and the longest step. A multiple of 900 s up to a day, of an hour up to a week."
  type        = number
  default     = 7200

  validation {
    condition     = var.stop_after_s >= 1800 && var.stop_after_s <= 604800 && var.stop_after_s % (var.stop_after_s <= 86400 ? 900 : 3600) == 0
    error_message = "stop_after_s: a multiple of 900 from 1800 to 86400, or of 3600 up to 604800. CloudWatch's alarms know no other periods."
  }
}

variable "max_hours" {
  description = "Set the fleet to zero so many hours after its first apply; later applies do not move that. Null: no limit."
  type        = number
  default     = null

  validation {
    condition     = var.max_hours == null ? true : var.max_hours >= 1 && floor(var.max_hours) == var.max_hours
    error_message = "max_hours: a whole number, 1 or more."
  }
}

variable "max_usd_per_hour" {
  description = "Most dollars for a spot instance and hour: at a higher price it is not bought, and one that runs is interrupted. With capacity_rebalance there are two for a while. Null: the on-demand price, which is AWS's own limit."
  type        = number
  default     = null

  validation {
    condition     = var.max_usd_per_hour == null ? true : var.max_usd_per_hour > 0
    error_message = "max_usd_per_hour: more than 0."
  }

  validation {
    condition     = var.max_usd_per_hour == null || var.on_demand_percentage == 0
    error_message = "max_usd_per_hour: it limits the price of spot instances; with on_demand_percentage above 0 others are bought at their own price."
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

  validation {
    # Instances show their tags in the metadata service, and EC2 starts none with another key. S3 takes ten tags on an object.
    condition     = length(var.tags) <= 9 && alltrue([for key in keys(var.tags) : can(regex("^[0-9A-Za-z_+=,.@:-]{1,127}$", key)) && !can(regex("^(aws:.*|[.]{1,2}|_index)$", key))])
    error_message = "tags: at most 9, with keys of letters, digits and _+=,.@:- (EC2 would start no instance with a space or a slash in one)."
  }

  validation {
    condition     = alltrue([for value in values(var.tags) : can(regex("^[\\p{L}\\p{N} _.:/=+@-]{0,256}$", value))])
    error_message = "tags: values of letters, digits, spaces and _.:/=+@-, at most 256 characters. AWS's services take no others."
  }
}
