"""`python -m harness`: the command line, for who has an interpreter and no `harness` on its path."""

from __future__ import annotations

from harness.cli.app import main

if __name__ == "__main__":
    main()
