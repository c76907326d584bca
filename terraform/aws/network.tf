# Where the nodes are: VPC and subnets as they are, a security group without a way in, a short way to S3.

data "aws_vpc" "this" {
  id      = var.vpc_id
  default = var.vpc_id == null ? true : null
}

data "aws_subnets" "all" {
  filter {
    name   = "vpc-id"
    values = [data.aws_vpc.this.id]
  }

  lifecycle {
    postcondition {
      condition     = length(self.ids) > 0
      error_message = "vpc_id: ${data.aws_vpc.this.id} has no subnets."
    }
    postcondition {
      condition     = length(setsubtract(var.subnet_ids, self.ids)) == 0
      error_message = "subnet_ids: ${join(", ", setsubtract(var.subnet_ids, self.ids))} not in ${data.aws_vpc.this.id}. Set vpc_id to the VPC that they are in."
    }
  }
}

locals {
  subnet_ids = length(var.subnet_ids) > 0 ? var.subnet_ids : sort(data.aws_subnets.all.ids)
}

resource "aws_security_group" "node" {
  #checkov:skip=CKV2_AWS_5: the launch template attaches it
  name        = local.name
  description = "Nodes of the run ${var.run}: out, and nobody in. For a shell there is Session Manager."
  vpc_id      = data.aws_vpc.this.id
  tags        = local.tags
}

resource "aws_vpc_security_group_egress_rule" "anywhere" {
  #checkov:skip=CKV_AWS_382: a program takes its packages, data and experiment tracker from where it likes
  security_group_id = aws_security_group.node.id
  description       = "S3, packages, data"
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "-1"
  tags              = local.tags
}

# EFA's traffic is not IP: it is allowed by group, or not at all.
resource "aws_vpc_security_group_ingress_rule" "between_nodes" {
  count = var.efa ? 1 : 0

  security_group_id            = aws_security_group.node.id
  description                  = "EFA between the nodes of this run"
  referenced_security_group_id = aws_security_group.node.id
  ip_protocol                  = "-1"
  tags                         = local.tags
}

resource "aws_vpc_security_group_egress_rule" "between_nodes" {
  count = var.efa ? 1 : 0

  security_group_id            = aws_security_group.node.id
  description                  = "EFA between the nodes of this run"
  referenced_security_group_id = aws_security_group.node.id
  ip_protocol                  = "-1"
  tags                         = local.tags
}

data "aws_route_tables" "all" {
  count  = var.s3_gateway_endpoint ? 1 : 0
  vpc_id = data.aws_vpc.this.id

  depends_on = [data.aws_subnets.all] # tables that the same apply makes are there once the subnets use them
}

resource "aws_vpc_endpoint" "s3" {
  count = var.s3_gateway_endpoint ? 1 : 0

  vpc_id            = data.aws_vpc.this.id
  service_name      = "com.amazonaws.${local.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = data.aws_route_tables.all[0].ids

  tags = merge(local.tags, { Name = local.name })
}
