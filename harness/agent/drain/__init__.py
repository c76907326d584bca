"""From a termination notice to the end: what can still become durable before the deadline."""
