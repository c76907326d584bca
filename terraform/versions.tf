# Which Terraform, which provider, and where: the profile and the region of the AWS command line, unless -var region=… says otherwise.

terraform {
  required_version = ">= 1.9" # a validation that looks at other variables

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.100, < 7"
    }
  }
}

variable "region" {
  description = "AWS region. Null: that of AWS_REGION or of the profile. Quotas for spot instances are per region."
  type        = string
  default     = null
}

provider "aws" {
  region = var.region
}
