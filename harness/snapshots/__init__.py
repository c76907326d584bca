"""The commit protocol over any ObjectStore. Knows no process and no torch."""
