# Which instances, how many, and how they are bought and lost.

variable "instance_types" {
  description = "Instance types that the run fits on, best first; the more, the fewer interruptions. Null: those with one GPU of gpu_memory_gb that the region has, unless instance_requirements are given."
  type        = list(string)
  default     = null

  validation {
    condition     = var.instance_types == null ? true : length(var.instance_types) > 0
    error_message = "instance_types: zero types. Name some, such as [\"g6e.xlarge\", \"g5.xlarge\"], or leave it out."
  }

  validation {
    condition     = var.instance_types == null || var.instance_requirements == null
    error_message = "instance_types: exactly one of instance_types and instance_requirements; leave the other out."
  }
}

variable "gpu_memory_gb" {
  description = "Without instance_types: memory of the GPU, 24 (g6, gr6, g5) or 48 (g6e)."
  type        = number
  default     = 24

  validation {
    condition     = contains([24, 48], var.gpu_memory_gb)
    error_message = "gpu_memory_gb: 24 or 48. For other GPUs name instance_types."
  }
}

variable "mix_gpu_memory" {
  description = "Whether instance_types may have GPUs of different memory. A run that fits on the largest only crashes on the others, and stops the fleet."
  type        = bool
  default     = false
}

variable "instance_requirements" {
  description = "Any type with so many NVIDIA GPUs, and at least so much GPU memory in all, vCPUs and memory. AWS finds the types, new ones too."
  type = object({
    gpu_count      = number
    gpu_memory_gib = number
    gpu_names      = optional(list(string), [])
    vcpus          = optional(number, 4)
    memory_gib     = optional(number, 16)
  })
  default = null

  validation {
    condition     = var.instance_requirements == null ? true : var.instance_requirements.gpu_count >= 1 && var.instance_requirements.gpu_memory_gib > 0 && var.instance_requirements.vcpus >= 1 && var.instance_requirements.memory_gib > 0
    error_message = "instance_requirements: gpu_count and vcpus are at least 1, gpu_memory_gib and memory_gib more than 0."
  }
}

variable "require_nvme" {
  description = "Refuse instance types without NVMe instance store, where local snapshots would be on the slow root volume."
  type        = bool
  default     = true
}

variable "on_demand_percentage" {
  description = "Percentage of instances bought on demand: 0 is all spot, 100 is none."
  type        = number
  default     = 0 # stated, since AWS's own default is 100

  validation {
    condition     = var.on_demand_percentage >= 0 && var.on_demand_percentage <= 100 && floor(var.on_demand_percentage) == var.on_demand_percentage
    error_message = "on_demand_percentage: a whole number from 0 to 100."
  }
}

variable "allocation_strategy" {
  description = "How AWS chooses among pools: price-capacity-optimized; capacity-optimized; or capacity-optimized-prioritized, which honours the order of instance_types."
  type        = string
  default     = "price-capacity-optimized"

  validation {
    condition     = contains(["price-capacity-optimized", "capacity-optimized", "capacity-optimized-prioritized"], var.allocation_strategy)
    error_message = "allocation_strategy: price-capacity-optimized, capacity-optimized or capacity-optimized-prioritized. The cheapest pool (lowest-price) is the one that is taken away first."
  }

  validation {
    condition     = var.allocation_strategy != "capacity-optimized-prioritized" || var.instance_requirements == null
    error_message = "allocation_strategy: capacity-optimized-prioritized needs the order of instance_types; instance_requirements have none."
  }
}

variable "capacity_rebalance" {
  description = "Whether AWS starts a replacement when it recommends to leave a pool. The old instance trains until the new one is ready to take the run over, which costs a handover and not a boot; it can also replace instances that would have lived."
  type        = bool
  default     = false
}

variable "desired_capacity" {
  description = "Instances to keep alive: 1, or 0 to stop the run and keep everything. Two would take the run from each other for ever."
  type        = number
  default     = 1

  validation {
    condition     = contains([0, 1], var.desired_capacity)
    error_message = "desired_capacity: 1, or 0 to stop: a run trains on one machine."
  }
}

variable "max_size" {
  description = "Most instances. One more than desired_capacity leaves room for a replacement that starts first."
  type        = number
  default     = 2

  validation {
    condition     = var.max_size >= 1 && var.max_size >= var.desired_capacity
    error_message = "max_size: at least 1, and not below desired_capacity."
  }
}

variable "ami_id" {
  description = "The AMI. Null: the one that ami_ssm_parameter names at the time of the apply."
  type        = string
  default     = null

  validation {
    condition     = var.ami_id == null || can(regex("^ami-[0-9a-f]{8,17}$", var.ami_id))
    error_message = "ami_id: such as ami-0123456789abcdef0."
  }
}

variable "ami_ssm_parameter" {
  description = "A public SSM parameter that names the AMI: by default the newest image of a line of AWS's Deep Learning AMIs, with NVIDIA's driver and PyTorch in /opt/pytorch. AWS patches a line for a year after PyTorch's release, and removes its parameter some day: then name a newer one."
  type        = string
  default     = "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.13-ubuntu-26.04/latest/ami-id"

  validation {
    condition     = startswith(var.ami_ssm_parameter, "/")
    error_message = "ami_ssm_parameter: a parameter's full name, which begins with a slash."
  }
}

variable "root_volume_gb" {
  description = "Size of the root volume in GB: the AMI, the environment, container images. Not below the AMI's own, about 75 GB."
  type        = number
  default     = 150

  validation {
    condition     = var.root_volume_gb >= 8 && var.root_volume_gb <= 16384
    error_message = "root_volume_gb: from 8 to 16384."
  }
}

variable "root_volume_mb_s" {
  description = "Throughput of the root volume in MB/s, from 125, which is free, to 1000. Packages and images are read from it at each boot."
  type        = number
  default     = 400

  validation {
    condition     = var.root_volume_mb_s >= 125 && var.root_volume_mb_s <= 1000
    error_message = "root_volume_mb_s: from 125 to 1000."
  }
}

variable "root_volume_fetch_mb_s" {
  description = "Rate in MB/s, 100 to 300, at which AWS fetches the root volume from the image's snapshot in advance. Without it each block is fetched when it is first read, slowly: importing torch takes a minute or more. AWS charges for it by the gigabyte of the image, at each boot. Null: no."
  type        = number
  default     = null

  validation {
    condition     = var.root_volume_fetch_mb_s == null ? true : var.root_volume_fetch_mb_s >= 100 && var.root_volume_fetch_mb_s <= 300
    error_message = "root_volume_fetch_mb_s: from 100 to 300."
  }
}

variable "hook_timeout_s" {
  description = "How long the group waits for a heartbeat of an instance that it ends. The node sends one each minute until its snapshot is durable. A reclaimed spot instance ends after two minutes all the same. A new value replaces the group."
  type        = number
  default     = 300

  validation {
    condition     = var.hook_timeout_s >= 120 && var.hook_timeout_s <= 7200
    error_message = "hook_timeout_s: from 120, two heartbeats, to 7200."
  }
}

variable "launch_timeout_s" {
  description = "How long an instance may take from its launch until it has taken over the run: boot, packages, container image. One that takes longer is ended, and another is started; after three such launches in a row the fleet is stopped. A new value replaces the group."
  type        = number
  default     = 1800

  validation {
    condition     = var.launch_timeout_s >= 300 && var.launch_timeout_s <= 7200
    error_message = "launch_timeout_s: from 300 to 7200."
  }
}

variable "efa" {
  description = "Whether the network interface is an Elastic Fabric Adapter, for runs on several nodes. The nodes may then talk to each other."
  type        = bool
  default     = false
}

variable "placement_group" {
  description = "Whether the nodes are close together, in a cluster placement group. It needs one subnet, for it cannot span zones."
  type        = bool
  default     = false

  validation {
    condition     = !var.placement_group || length(var.subnet_ids) == 1
    error_message = "placement_group: a cluster placement group lies in one zone; name one subnet in subnet_ids."
  }
}
