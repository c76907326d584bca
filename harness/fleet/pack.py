"""Pack a project's folder and a wheel of the harness into the archive that an instance trains from.

Owns what of a folder is packed. The same input gives the same archive, byte for byte. Nothing of the user's is changed.
"""

from __future__ import annotations

import argparse
import base64
import csv
import gzip
import hashlib
import importlib.metadata
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.fleet.vendor import Image, PackError, run, vendor

_UNWANTED = {".git", ".venv", "venv", ".harness", "node_modules", "__pycache__"}
_OF_INSTALLERS = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first instant that zip knows


def pack(folder: Path, archive: Path, image: Image | None = None) -> None:
    """Write `archive`, a .tar.gz, of `folder`, with a wheel of the harness unless the folder has one.

    Args:
        folder: of the project. In a git checkout its tracked files with their present content, and new files that are
            not ignored; elsewhere everything but environments and caches.
        archive: the file to write; an earlier one is replaced at the end.
        image: also pack the wheels of everything that is installed on a node with this image. `None`: do not.

    Raises:
        PackError: it cannot be packed; the text says why, and no archive was written.
    """
    if not folder.is_dir():
        raise PackError(f"{folder} is not a folder")
    folder = folder.resolve()
    with tempfile.TemporaryDirectory(prefix="harness-pack-") as made:
        work = Path(made)
        packed = _files_of(folder, archive)
        if not packed:
            raise PackError(f"{folder} has no files to pack")
        wheels = sorted(name for name in packed if _is_our_wheel(name))
        wheel = packed[wheels[-1]] if wheels else build_wheel(work)
        if not wheels:
            packed[f"wheels/{wheel.name}"] = wheel
        if image is not None:
            vendored = vendor(wheel, packed.get("requirements.txt"), image, work / "vendored")
            packed |= {f"wheels/{path.name}": path for path in vendored}
        _write(packed, folder, archive)


def build_wheel(into: Path) -> Path:
    """Make a wheel of the harness in the folder `into`: of the clone that this is, or of the installed package.

    Raises:
        PackError: the clone's wheel cannot be built, or the package is not installed as a whole.
    """
    clone = Path(__file__).resolve().parents[2]
    if (clone / "pyproject.toml").is_file():
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
        run([*pip, "--wheel-dir", str(into), str(clone)], "the wheel of the harness cannot be built")
        (wheel,) = into.glob("harness*.whl")
        return wheel
    return _wheel_of_installed(into)


# ------------------------------------------------------------------------------------------------------ what is packed


def _files_of(folder: Path, archive: Path) -> dict[str, Path]:
    """Return what is packed of `folder`, by its name in the archive."""
    packed = {name: folder / name for name in _names(folder)}
    for pattern in ("harness*.whl", "wheels/harness*.whl"):  # also ignored ones
        packed |= {path.relative_to(folder).as_posix(): path for path in folder.glob(pattern)}
    for name in packed:
        if name.endswith("/"):  # git does not list its files
            raise PackError(f"{folder / name} is a repository of its own: make it a submodule, or have git ignore it")
    there = {name: path for name, path in packed.items() if path.is_symlink() or path.is_file()}  # not deleted
    return {name: path for name, path in there.items() if path.resolve() != archive.resolve()}  # not an earlier archive


def _names(folder: Path) -> Iterator[str]:
    git = ["git", "-C", str(folder)]
    try:
        known = subprocess.run(
            [*git, "rev-parse", "--is-inside-work-tree"], capture_output=True, text=True, check=False
        )
        inside, why = known.returncode == 0, known.stderr.strip() or known.stdout.strip()
    except FileNotFoundError:
        inside, why = False, "git is not installed"
    if inside:
        tracked = run([*git, "ls-files", "-z", "--cached", "--recurse-submodules"], "git cannot list its files")
        new = run([*git, "ls-files", "-z", "--others", "--exclude-standard"], "git cannot list its files")
        yield from filter(None, (tracked + new).split("\0"))
        return
    if (folder / ".git").exists():  # packed as a plain folder, it would contain ignored files, secrets too
        raise PackError(f"{folder} is a git checkout, but: {why}")
    for directory, folders, files in os.walk(folder):
        links = [name for name in folders if Path(directory, name).is_symlink()]
        folders[:] = set(folders) - _UNWANTED - set(links)
        yield from (Path(directory, name).relative_to(folder).as_posix() for name in (*files, *links))


def _is_our_wheel(name: str) -> bool:
    where, _, file = name.rpartition("/")
    return where in ("", "wheels") and file.startswith("harness") and file.endswith(".whl")


# ---------------------------------------------------------------------------------------------------- how it is written


def _write(packed: Mapping[str, Path], folder: Path, archive: Path) -> None:
    unfinished = archive.with_name(archive.name + ".new")
    try:
        with (
            unfinished.open("wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=0) as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for name, path in sorted(packed.items()):
                _add(tar, name, path, folder)
        unfinished.rename(archive)
    except OSError as err:
        raise PackError(f"{archive} was not written: {err}") from err
    finally:
        unfinished.unlink(missing_ok=True)


def _add(tar: tarfile.TarFile, name: str, path: Path, folder: Path) -> None:
    member = tar.gettarinfo(path, name)
    if member.issym():
        target = os.path.normpath(os.path.join(os.path.dirname(name), member.linkname))  # noqa: PTH118, PTH120  names
        outside = os.path.isabs(target) or target.split("/")[0] == ".."  # noqa: PTH117  as on the instance
        if outside or not path.resolve().is_relative_to(folder):
            raise PackError(
                f"{path} is a link to {member.linkname}, by its name outside of the folder: no instance has that"
                " target. A link inside the folder has to be relative"
            )
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    member.mode = 0o755 if member.mode & 0o100 else 0o644
    if member.islnk():  # a second name of the same file
        member.type, member.size = tarfile.REGTYPE, path.stat().st_size
    with path.open("rb") if member.isreg() else io.BytesIO() as content:
        tar.addfile(member, content)


# ------------------------------------------------------------------------------------------------- a wheel of ourselves


def _wheel_of_installed(into: Path) -> Path:
    """Make a wheel again of what pip has unpacked."""
    try:
        installed = importlib.metadata.distribution("harness-spot")
    except importlib.metadata.PackageNotFoundError:
        raise PackError("neither a clone nor an installed package: there is nothing to make a wheel of") from None
    info = f"harness_spot-{installed.version}.dist-info"
    files = {
        file.as_posix(): Path(str(file.locate()))
        for file in installed.files or ()
        if ".." not in file.parts and "__pycache__" not in file.parts
        if not (file.parts[0] == info and file.name in _OF_INSTALLERS)
    }
    if not any(name.startswith("harness/") for name in files):
        raise PackError(f"the harness is installed from {installed.locate_file('')} in a form that cannot be packed")
    wheel = into / f"harness_spot-{installed.version}-py3-none-any.whl"
    record = io.StringIO()
    lines = csv.writer(record, lineterminator="\n")
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in sorted(files.items()):
            content = path.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.writerow([name, f"sha256={digest}", len(content)])
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), content, zipfile.ZIP_DEFLATED)
        lines.writerow([f"{info}/RECORD", "", ""])
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD", _EPOCH), record.getvalue(), zipfile.ZIP_DEFLATED)
    return wheel


# -------------------------------------------------------------------------------------------------------- scripts/pack

_ABOUT = """\
Packs a project for a fleet: one archive holds all that an instance needs to run it. The archive is ARCHIVE, or FOLDER's
name with .tar.gz in the current directory:

    scripts/pack ~/my-project
    terraform apply -var source_archive="$PWD/my-project.tar.gz" …

In a git checkout, it packs the tracked files with their present content, and new files that are not ignored. Elsewhere
it packs everything except .git, .venv, venv, .harness, node_modules and __pycache__. A wheel of the harness, built from
this clone, is added to wheels/, unless the project has one. The same input gives the same archive, byte for byte. The
archive's path is printed.

With --vendor, the wheels of what requirements.txt and the harness need are packed too, but for torch, which the image
has. Every instance then installs exactly these files, by their sums, and asks no package index. To find the right ones,
the image's Python and torch have to be known.
"""


def main() -> None:
    """Run scripts/pack."""
    parser = argparse.ArgumentParser(
        "scripts/pack", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("archive", type=Path, metavar="ARCHIVE", nargs="?")
    parser.add_argument("--vendor", action="store_true", help="pack the wheels of everything that is needed")
    Image.add_options(parser)
    given = parser.parse_args()
    archive = given.archive or Path(f"{given.folder.resolve().name}.tar.gz")
    try:
        pack(given.folder, archive, Image.of_options(given) if given.vendor else None)
    except PackError as err:
        sys.exit(f"pack: {err}")
    sys.stdout.write(f"{archive}\n")


if __name__ == "__main__":
    main()
