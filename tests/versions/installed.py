"""Says what an environment of scripts/test-versions has, and ends with 1 where `oldest` has not the oldest.

python -m tests.versions.installed oldest
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Callable, Iterator

from tests.versions.wanted import name_of, promised


def differing(lines: list[str], version: Callable[[str], str]) -> Iterator[str]:
    """Yield, for each line whose minimum is not what is installed, both."""
    for line in lines:
        name, least, found = name_of(line), re.split(">=|==", line)[1], version(name_of(line))
        if not re.fullmatch(rf"{re.escape(least)}(\.0)*(\+.*)?", found):
            yield f"{name}: {least} is promised, and {found} was tested"


def main(which: str) -> None:
    """Print the versions, and compare them."""
    names = dict.fromkeys(name_of(line) for line in promised())
    print(f"Python {platform.python_version()}", *(f"{name} {importlib.metadata.version(name)}" for name in names))
    if which == "oldest" and (wrong := list(differing(promised(), importlib.metadata.version))):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main(sys.argv[1])
