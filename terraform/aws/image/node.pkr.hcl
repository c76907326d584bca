# An image with all that a node prepares at its boot: the code, its packages, the scripts. A node of such an image only
# looks whether they are still the ones that it is told to have. For Packer; terraform/README.md says when it pays.
#
#   packer init . && packer build -var run=gpt-small -var region=eu-west-1 -var store=s3://BUCKET/checkpoints \
#       -var source_archive=s3://BUCKET/sources/gpt-small/packed/DIGEST.tar.gz -var instance_profile=harness-gpt-small-euw1 .

packer {
  required_plugins {
    amazon = {
      source  = "github.com/hashicorp/amazon"
      version = ">= 1.3"
    }
  }
}

variable "run" {
  type = string
}

variable "region" {
  type = string
}

variable "store" {
  type        = string
  description = "The output store: there the first node leaves which packages it has, and this is the first node."
}

variable "source_archive" {
  type        = string
  description = "As a node has it in HARNESS_SOURCE: s3://bucket/key, or git+https://host/repository@ref."
}

variable "instance_profile" {
  type        = string
  description = "One that may read the archive and write the records: the fleet's own, which its first apply has made."
}

variable "harness_package" {
  type    = string
  default = ""
}

variable "setup_command" {
  type    = string
  default = ""
}

variable "python" {
  type    = string
  default = ""
}

variable "instance_type" {
  type    = string
  default = "g6.xlarge"
}

variable "ami_ssm_parameter" {
  type    = string
  default = "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.13-ubuntu-26.04/latest/ami-id"
}

data "amazon-parameterstore" "image" {
  name   = var.ami_ssm_parameter
  region = var.region
}

source "amazon-ebs" "node" {
  ami_name             = "harness-${var.run}-{{timestamp}}"
  source_ami           = data.amazon-parameterstore.image.value
  region               = var.region
  instance_type        = var.instance_type
  iam_instance_profile = var.instance_profile
  ssh_username         = "ubuntu"
  imds_support         = "v2.0"
  encrypt_boot         = true

  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 2
  }

  tags = {
    harness-run = var.run
  }
}

build {
  sources = ["source.amazon-ebs.node"]

  provisioner "file" {
    sources     = ["../../../scripts/bootstrap-node.sh", "../../../scripts/resume.sh", "../../../scripts/stop-fleet.sh", "bake.sh"]
    destination = "/tmp/"
  }

  provisioner "shell" {
    inline = ["sudo --preserve-env bash /tmp/bake.sh"]
    env = {
      HARNESS_RUN     = var.run
      HARNESS_STORE   = var.store
      HARNESS_SOURCE  = var.source_archive
      HARNESS_PACKAGE = var.harness_package
      HARNESS_SETUP   = var.setup_command
      HARNESS_PYTHON  = var.python
      AWS_REGION      = var.region
    }
  }
}
