"""The process that survives: watches for notices, makes snapshots durable, finds them again. Never imports torch."""
