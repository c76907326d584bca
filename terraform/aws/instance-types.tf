# Which types are meant, and whether the region, the AMI and the run can do with them: known before anything is bought.

locals {
  # One NVIDIA GPU of so many GB, and an NVMe disk; those that the region has.
  types_of_memory = {
    24 = ["g6.xlarge", "g6.2xlarge", "g6.4xlarge", "g6.8xlarge", "gr6.4xlarge", "gr6.8xlarge", "g5.xlarge", "g5.2xlarge", "g5.4xlarge", "g5.8xlarge"]
    48 = ["g6e.xlarge", "g6e.2xlarge", "g6e.4xlarge"]
  }
  usual_types = local.types_of_memory[var.gpu_memory_gb]

  by_requirements = var.instance_requirements != null
  named_types     = local.by_requirements ? [] : coalesce(var.instance_types, local.usual_types)
  instance_types  = local.by_requirements || var.instance_types != null ? local.named_types : tolist([for type in local.usual_types : type if contains(data.aws_ec2_instance_types.offered[0].instance_types, type)])
}

data "aws_ec2_instance_types" "offered" {
  count = local.by_requirements ? 0 : 1

  filter {
    name   = "instance-type"
    values = local.named_types
  }

  lifecycle {
    postcondition {
      condition     = var.instance_types == null || length(setsubtract(local.named_types, self.instance_types)) == 0
      error_message = "instance_types: ${join(", ", setsubtract(local.named_types, self.instance_types))} not offered in ${local.region}."
    }
    postcondition {
      condition     = length(self.instance_types) > 0
      error_message = "instance_types: ${local.region} has none of ${join(", ", local.named_types)}. Name others, or another region."
    }
  }
}

data "aws_ec2_instance_type" "each" {
  for_each      = toset(local.instance_types)
  instance_type = each.value

  lifecycle {
    postcondition {
      condition     = self.instance_storage_supported || !var.require_nvme
      error_message = "instance_types: ${each.value} has no NVMe instance store, and local snapshots would be on the slow root volume. Take the type with a d in its name or another, or set require_nvme = false."
    }
    postcondition {
      condition     = contains(self.supported_architectures, data.aws_ami.node.architecture)
      error_message = "instance_types: ${each.value} is ${join(", ", self.supported_architectures)}, and the AMI ${data.aws_ami.node.architecture}. Set ami_id or ami_ssm_parameter to one that fits."
    }
    postcondition {
      condition     = self.efa_supported || !var.efa
      error_message = "instance_types: ${each.value} has no EFA; set efa = false, or take another type."
    }
  }
}

locals {
  # GiB of the GPUs of each type, 0 without; "24 GB" are 22.4 to 24 GiB.
  gpu_memory  = [for type in data.aws_ec2_instance_type.each : max(0, [for gpu in type.gpus : gpu.memory_size / 1024]...)]
  gpus_differ = length(local.gpu_memory) > 0 && max(0, local.gpu_memory...) > 1.25 * min(1048576, local.gpu_memory...)
}
