# What is trained: the run, its program, and the software that it needs on an instance.

variable "run" {
  description = "Name of the run: the folder of its checkpoints, and part of the name of everything that is made here."
  type        = string

  validation {
    # harness/core/snapshot.py allows _.=+- and 100 characters; SNS, IAM and EventBridge allow less.
    condition     = can(regex("^[A-Za-z0-9_][A-Za-z0-9_-]{0,39}$", var.run))
    error_message = "run: letters, digits, _ and - (not first), at most 40 characters. AWS takes no others in the names of topics, roles and rules."
  }
}

variable "command" {
  description = "The program, as one line of shell words: \"python train.py --lr 3e-4\". It is split like a shell would, but no shell runs it: no pipes, no variables."
  type        = string

  validation {
    condition     = trimspace(var.command) != "" && !can(regex("[[:cntrl:]]", var.command))
    error_message = "command: one line that is not empty, such as \"python train.py\"."
  }
}

variable "source_archive" {
  description = "The program's code: a .tar.gz, .tgz or .zip on this machine (it is uploaded), an s3://bucket/key of one, or git+https://host/repository@ref. Empty: none, all is in the image."
  type        = string
  default     = ""

  validation {
    condition     = var.source_archive == "" || can(regex("^git\\+https://[^[:space:]/@]+/[^[:space:]@]+@[^[:space:]@]+$", var.source_archive)) || can(regex("^[^[:cntrl:]]+\\.(tar\\.gz|tgz|zip)$", var.source_archive))
    error_message = "source_archive: a path or s3:// address that ends in .tar.gz, .tgz or .zip, or git+https://host/repository@ref with a branch, tag or commit, and without a user or a token: it would stand in the user data."
  }

  validation {
    condition     = var.source_archive != "" || var.container_image != "" || var.harness_package != "" || var.ami_id != null
    error_message = "source_archive: a program without code: the instance would boot, find nothing to run, and end. Give source_archive (scripts/pack makes one), container_image, harness_package, or an ami_id that has everything."
  }

  validation {
    condition     = var.source_archive == "" || can(regex("^(s3|git\\+https)://", var.source_archive)) || try(fileexists(pathexpand(var.source_archive)), false) # a folder is an error, not a no
    error_message = "source_archive: there is no file ${var.source_archive} on this machine (a relative path starts where terraform runs). To make one: git archive --format=tar.gz -o source.tar.gz HEAD"
  }
}

variable "harness_package" {
  description = "What pip installs the harness from: an s3:// address of a wheel, or a requirement of an index. Empty: a wheel in the archive, in its top folder or in wheels/."
  type        = string
  default     = ""

  validation {
    condition     = !can(regex("[[:cntrl:]]", var.harness_package)) && (!startswith(var.harness_package, "s3://") || endswith(var.harness_package, ".whl"))
    error_message = "harness_package: one line; an s3:// address ends in .whl."
  }
}

variable "setup_command" {
  description = "A shell line that completes the environment, run once on each instance in the folder of the code. Empty: pip install -r requirements.txt, where that file is."
  type        = string
  default     = ""

  validation {
    condition     = !can(regex("[[:cntrl:]]", var.setup_command))
    error_message = "setup_command: one line. A longer one belongs into a script in the archive: \"bash setup.sh\"."
  }
}

variable "python" {
  description = "The interpreter, with torch, that the environment is built on. Empty: the AMI's /opt/pytorch/bin/python, else python3."
  type        = string
  default     = ""

  validation {
    condition     = var.python == "" || can(regex("^/[^[:cntrl:][:space:]]+$", var.python))
    error_message = "python: the absolute path of an interpreter on the AMI."
  }
}

variable "container_image" {
  description = "An image that holds the harness and the program, to run instead of an environment on the AMI. One in ECR may be pulled. Empty: none."
  type        = string
  default     = ""

  validation {
    condition     = !can(regex("[[:cntrl:][:space:]]", var.container_image))
    error_message = "container_image: the name of an image, such as 123456789012.dkr.ecr.us-east-1.amazonaws.com/train:v3."
  }
}

variable "settings" {
  description = "Settings of the harness, by their names in docs/operations.md: { every_s = \"30\", keep_last = \"5\" }."
  type        = map(string)
  default     = {}

  validation {
    condition     = length(setsubtract(keys(var.settings), local.setting_names)) == 0
    error_message = "settings: ${join(", ", setsubtract(keys(var.settings), local.setting_names))}: there is no such setting. There are ${join(", ", local.setting_names)}."
  }

  validation {
    condition     = alltrue([for value in values(var.settings) : !can(regex("[[:cntrl:]]", value))])
    error_message = "settings: each value is one line."
  }

}

variable "env" {
  description = "Environment variables of the program: { WANDB_PROJECT = \"gpt\" }. They can be read in the configuration, in the state and in the user data: for a password or a token use secrets."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for name in keys(var.env) : can(regex("^[A-Za-z_][A-Za-z0-9_]*$", name)) && !startswith(name, "HARNESS_")])
    error_message = "env: names of letters, digits and _, not a digit first, and not HARNESS_…: those are settings."
  }

  validation {
    condition     = alltrue([for value in values(var.env) : !can(regex("[[:cntrl:]]", value))])
    error_message = "env: each value is one line. Secrets may have several."
  }
}

variable "secrets" {
  description = "Environment variables of the program whose values are read on the node, at each start: { HF_TOKEN = ARN }, of a parameter of Systems Manager, or of a secret of Secrets Manager. As in ECS, :KEY:: after the ARN of a secret takes one key of its JSON. Only the ARNs are in the configuration, the state and the user data; the nodes' role may read exactly these."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for name in keys(var.secrets) : can(regex("^[A-Za-z_][A-Za-z0-9_]*$", name)) && !startswith(name, "HARNESS_")])
    error_message = "secrets: names of letters, digits and _, not a digit first, and not HARNESS_…."
  }

  validation {
    condition     = alltrue([for arn in values(var.secrets) : can(regex("^arn:[a-z-]+:(ssm:[a-z0-9-]+:[0-9]{12}:parameter/[^[:space:]]+|secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:[^:[:space:]]+(:[^:[:space:]]*:[^:[:space:]]*:[^:[:space:]]*)?)$", arn))])
    error_message = "secrets: ARNs such as arn:aws:ssm:REGION:ACCOUNT:parameter/NAME or arn:aws:secretsmanager:REGION:ACCOUNT:secret:NAME-AbCdEf, and never a value."
  }

  validation {
    condition     = length(setintersection(keys(var.secrets), keys(var.env))) == 0
    error_message = "secrets: ${join(", ", setintersection(keys(var.secrets), keys(var.env)))} is in env too."
  }
}

variable "secrets_kms_key_arn" {
  description = "The key that encrypts the secrets, if it is one of your own. Null: AWS's own keys."
  type        = string
  default     = null

  validation {
    condition     = var.secrets_kms_key_arn == null || can(regex("^arn:[a-z-]+:kms:[a-z0-9-]+:[0-9]{12}:key/[A-Za-z0-9-]+$", var.secrets_kms_key_arn))
    error_message = "secrets_kms_key_arn: the ARN of a key (not of an alias): arn:aws:kms:REGION:ACCOUNT:key/ID."
  }
}

locals {
  # Of harness/config/settings.py, but for those that are made here or have a variable; and `harness resume`'s self_test.
  setting_names = [
    "drain_file", "durable_every_s", "every_s", "every_steps", "grace_s", "handover_s", "keep_every", "keep_last",
    "keep_local", "local", "log_format", "max_crashes", "overlap", "s3_kms_key_id", "s3_sse", "self_test", "shared",
    "slots", "upload_bytes_s", "watch", "watch_as",
  ]
}
