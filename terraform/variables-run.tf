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
    condition     = alltrue([for name in keys(var.settings) : can(regex("^[a-z][a-z0-9_]*$", name))])
    error_message = "settings: the names are those of docs/operations.md, in small letters, such as durable_every_s."
  }

  validation {
    condition     = alltrue([for value in values(var.settings) : !can(regex("[[:cntrl:]]", value))])
    error_message = "settings: each value is one line."
  }

  validation {
    condition     = length(setintersection(keys(var.settings), ["run", "store", "command", "source", "package", "setup", "python", "image", "group", "hook", "topic", "metrics", "log_group", "root"])) == 0
    error_message = "settings: run, command, python, … have variables of their own; store, group, hook, topic, metrics and log_group are made here."
  }
}
