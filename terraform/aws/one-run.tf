# One state is one run, in one region. Another name would end this fleet in the middle of its work; in another region
# Terraform would find nothing of it, forget it, and leave it running.

resource "terraform_data" "one_run" {
  input = { run = var.run, region = local.region }

  lifecycle {
    ignore_changes = [input] # what it was made for

    postcondition {
      condition     = self.output.run == var.run
      error_message = "run: this state has the fleet of the run ${self.output.run}. For another one: terraform workspace new ${var.run}. To be rid of the first: terraform destroy."
    }
    postcondition {
      condition     = self.output.region == local.region
      error_message = "region: this state has a fleet in ${self.output.region}, and ${local.region} is asked for. Set region (or AWS_REGION) to ${self.output.region}; to move, terraform destroy there first."
    }
  }
}
