"""Compares the files of an sdist and a wheel with those that git tracks.

python tests/versions/contents.py dist
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGETS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
ALWAYS = {"pyproject.toml", "README.md", "LICENSE", ".gitignore"}
"""What an sdist has besides what it is told."""


def chosen(tracked: Iterable[str], patterns: Iterable[str]) -> set[str]:
    """The tracked files that patterns of pyproject.toml name: files, folders, and wildcards within a folder."""
    names = [pattern.removeprefix("/") for pattern in patterns]
    return {
        path
        for path in tracked
        for name in names
        if path == name or path.startswith(f"{name}/") or (fnmatch(path, name) and path.count("/") == name.count("/"))
    }


def in_wheel(path: str) -> str:
    """Where a file of the repository is in the wheel."""
    for source, target in TARGETS["wheel"]["sources"].items():
        if path.startswith(f"{source}/"):
            return f"{target}{path.removeprefix(source)}"
    return path


def compared(kind: str, found: set[str], expected: set[str]) -> list[str]:
    """Say what is missing, and what is too much."""
    return [
        *(f"{kind}: {path} is missing" for path in sorted(expected - found)),
        *(f"{kind}: {path} is not tracked, or not meant for it" for path in sorted(found - expected)),
    ]


def main(folder: Path) -> int:
    """Compare both."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    with tarfile.open(sdist) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        installed = {name for name in archive.namelist() if ".dist-info/" not in name}
    wrong = [
        *compared("sdist", packed - {"PKG-INFO"}, chosen(tracked, TARGETS["sdist"]["include"]) | ALWAYS),
        *compared("wheel", installed, {in_wheel(path) for path in chosen(tracked, TARGETS["wheel"]["include"])}),
    ]
    print(*wrong or [f"{sdist.name}: {len(packed)} files, {wheel.name}: {len(installed)} files"], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
