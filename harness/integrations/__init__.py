"""Integrations: one line in a framework's own trainer. Each module imports its framework, and only that one."""
