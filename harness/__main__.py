"""`python -m harness`: the command line, for users who have an interpreter but no `harness` on their PATH."""

from __future__ import annotations

from harness.cli.entry import main

if __name__ == "__main__":
    main()
