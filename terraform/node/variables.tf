# What a node is told. The module of a cloud has checked it, and asked its user.

variable "settings" {
  description = "Settings of the harness, by their names in docs/operations.md."
  type        = map(string)
}

variable "env" {
  description = "Environment variables of the program."
  type        = map(string)
}

variable "secrets" {
  description = "Environment variables of the program, with where a node reads their values."
  type        = map(string)
}

variable "told" {
  description = "Everything else that the scripts of a node know, by the names of node.env."
  type        = map(string)
}

variable "scripts_in" {
  description = "The folder of the run's scripts, in the cloud's store."
  type        = string
}

variable "fetch" {
  description = "The cloud's way to fetch an object: a function `get KEY FILE` of bash, which finds `root` and `say`."
  type        = string
}
