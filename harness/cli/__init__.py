"""The command line: `harness`."""
