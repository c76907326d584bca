"""Commands that look at a run from outside the agent: status, ls, verify, rm, dry run, export, doctor."""
