# Nodes without public addresses: their packages and AWS's APIs come through one NAT gateway, their checkpoints through an
# endpoint of S3, which costs nothing. The gateway costs about $32 a month and $0.045 per GB, also while nothing trains.

variable "notify_email" {
  type = string
}

variable "source_archive" {
  type    = string
  default = "my-project.tar.gz" # scripts/pack ~/my-project
}

data "aws_availability_zones" "here" {
  #checkov:skip=CKV_AWS_394: three of the zones are enough, whichever they are
  state = "available"
}

locals {
  zones = slice(data.aws_availability_zones.here.names, 0, 3)
}

resource "aws_vpc" "this" {
  #checkov:skip=CKV2_AWS_11: flow logs cost by the gigabyte, and checkpoints are many; turn them on where they are wanted
  cidr_block           = "10.20.0.0/16"
  enable_dns_hostnames = true
  tags                 = { Name = "training" }
}

# Without rules: what is started here by mistake reaches nothing.
resource "aws_default_security_group" "this" {
  vpc_id = aws_vpc.this.id
}

resource "aws_subnet" "private" {
  count             = length(local.zones)
  vpc_id            = aws_vpc.this.id
  availability_zone = local.zones[count.index]
  cidr_block        = cidrsubnet(aws_vpc.this.cidr_block, 4, count.index)
  tags              = { Name = "training-${local.zones[count.index]}" }
}

resource "aws_subnet" "public" {
  vpc_id            = aws_vpc.this.id
  availability_zone = local.zones[0]
  cidr_block        = cidrsubnet(aws_vpc.this.cidr_block, 4, 15)
  tags              = { Name = "training-nat" }
}

resource "aws_internet_gateway" "this" {
  vpc_id = aws_vpc.this.id
}

resource "aws_eip" "nat" {
  domain = "vpc"
}

resource "aws_nat_gateway" "this" {
  allocation_id = aws_eip.nat.id
  subnet_id     = aws_subnet.public.id
  depends_on    = [aws_internet_gateway.this]
}

resource "aws_route_table" "public" {
  vpc_id = aws_vpc.this.id

  route {
    cidr_block = "0.0.0.0/0"
    gateway_id = aws_internet_gateway.this.id
  }
}

resource "aws_route_table_association" "public" {
  subnet_id      = aws_subnet.public.id
  route_table_id = aws_route_table.public.id
}

resource "aws_route_table" "private" {
  vpc_id = aws_vpc.this.id

  route {
    cidr_block     = "0.0.0.0/0"
    nat_gateway_id = aws_nat_gateway.this.id
  }
}

resource "aws_route_table_association" "private" {
  count          = length(local.zones)
  subnet_id      = aws_subnet.private[count.index].id
  route_table_id = aws_route_table.private.id
}

module "fleet" {
  source = "../../aws"

  run                 = "gpt-private"
  command             = "python train.py"
  source_archive      = var.source_archive
  notify_email        = var.notify_email
  vpc_id              = aws_vpc.this.id
  subnet_ids          = aws_route_table_association.private[*].subnet_id # once they have their way out
  s3_gateway_endpoint = true                                             # nobody else is in this VPC
}

output "next" {
  value = module.fleet.next
}
