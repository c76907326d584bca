# No provider block: who calls the module says with which account and in which region, and may call it often.

terraform {
  required_version = ">= 1.9" # a validation that looks at other variables

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.100, < 7"
    }
  }
}
