"""Terraform, as a program: its commands, printed before they are run, in a folder that is a plain root module.

Owns the folder: a copy of the module that this package holds, so that it can be used without this package, too.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.fleet.definition import FILE, Definition

_OLDEST = (1, 10)  # the first whose state in S3 has a lock without a table of DynamoDB
_BACKEND = "backend.tf"
_SCRIPTS = ("bootstrap-node.sh", "resume.sh", "stop-fleet.sh")
_NOT_THE_MODULE = ("tests", "examples", ".terraform")
_PLAN = "fleet.plan"


def find_module() -> tuple[Path, Path]:
    """Return the folders of the module and of the nodes' scripts: in the package, or in the clone that this is.

    Raises:
        ConfigError: they are in neither.
    """
    package = Path(__file__).resolve().parent
    for home in (package, package.parents[1]):
        if (home / "terraform" / "main.tf").is_file() and (home / "scripts" / _SCRIPTS[0]).is_file():
            return home / "terraform", home / "scripts"
    raise ConfigError(f"the module is not in this installation of the harness ({package}): install it again")


class Terraform:
    """The commands of Terraform in one folder.

    Args:
        folder: has, or gets, `terraform/` and `scripts/`.
        say: shows a line to the user.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.root = folder / "terraform"
        self._folder, self._say = folder, say

    def write(self, definition: Definition, region: str) -> None:
        """Bring the module of this package, and these values, into the folder."""
        module, scripts = find_module()
        _refresh(module, self.root)
        (self._folder / "scripts").mkdir(exist_ok=True)
        for name in _SCRIPTS:
            shutil.copy(scripts / name, self._folder / "scripts" / name)
        values = Definition({**definition.values, "region": region})
        _replace(self.root / FILE, values.to_json())

    def keep_state_in(self, bucket: str, key: str, region: str) -> None:
        """Have the state in S3 from now on. One that is on this machine is taken there.

        Raises:
            ConfigError: terraform failed.
        """
        backend = {"bucket": bucket, "key": key, "region": region, "use_lockfile": True, "encrypt": True}
        lines = "".join(f"    {name} = {json.dumps(value)}\n" for name, value in backend.items())
        _replace(self.root / _BACKEND, f'terraform {{\n  backend "s3" {{\n{lines}  }}\n}}\n'.encode())
        self.init("-migrate-state", "-force-copy")

    def keep_state_here(self) -> None:
        """Bring the state back from S3, whose bucket is about to be deleted. Raises ConfigError."""
        (self.root / _BACKEND).unlink(missing_ok=True)
        self.init("-migrate-state", "-force-copy")

    @property
    def has_local_state(self) -> bool:
        """Whether the state on this machine has something in it."""
        path = self.root / "terraform.tfstate"
        return path.is_file() and bool(json.loads(path.read_bytes() or b"{}").get("resources"))

    def init(self, *options: str) -> None:
        """Make the folder ready. Raises ConfigError: no terraform, one that is too old, or no provider."""
        self._check_version()
        self.run("init", "-input=false", *options, quiet=True)

    def plan(self, *options: str) -> dict[str, Any]:
        """Plan, and return the plan as `terraform show -json` has it. It can be applied once. Raises ConfigError."""
        self.run("plan", "-input=false", f"-out={_PLAN}", *options, quiet=True)
        shown = self._call(["show", "-json", _PLAN], capture=True)
        found: dict[str, Any] = json.loads(shown)
        return found

    def apply_plan(self) -> None:
        """Apply what `plan` returned, and nothing else. Raises ConfigError."""
        self.run("apply", "-input=false", _PLAN)
        (self.root / _PLAN).unlink(missing_ok=True)

    def outputs(self) -> dict[str, Any]:
        """Return the outputs; empty if nothing is applied. Raises ConfigError."""
        found: Mapping[str, Any] = json.loads(self._call(["output", "-json"], capture=True))
        return {name: output["value"] for name, output in found.items()}

    def attribute(self, kind: str, name: str) -> str:
        """Return an attribute of the first resource of a kind in the state. Raises ConfigError if there is none."""
        found = json.loads(self._call(["show", "-json"], capture=True))
        modules = [found.get("values", {}).get("root_module", {})]
        while modules:
            module = modules.pop()
            modules += module.get("child_modules", [])
            for resource in module.get("resources", []):
                if resource["type"] == kind and resource["mode"] == "managed":
                    return str(resource["values"][name])
        raise ConfigError(f"terraform has made no {kind}")

    def addresses(self) -> list[str]:
        """Return the addresses of everything in the state. Raises ConfigError."""
        try:
            return self._call(["state", "list"], capture=True).split()
        except ConfigError as err:
            if "No state file was found" in str(err):
                return []
            raise

    def run(self, *words: str, quiet: bool = False) -> None:
        """Show a command as the user could give it, and run it.

        Args:
            words: the command.
            quiet: show its output only if it fails.

        Raises:
            ConfigError: it failed.
        """
        self._say(f"$ terraform -chdir={shlex.quote(str(self.root))} {shlex.join(words)}")
        self._call(list(words), capture=quiet)

    def _call(self, words: list[str], *, capture: bool) -> str:
        command = ["terraform", f"-chdir={self.root}", *words]
        sink = subprocess.PIPE if capture else None
        environ = {**os.environ, "TF_IN_AUTOMATION": "1"}
        try:
            # Its output is not ours: stdout is for data.
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=sink or 2, stderr=sink, text=True, env=environ, check=False
            )
        except FileNotFoundError:
            raise ConfigError("there is no terraform here: https://developer.hashicorp.com/terraform/install") from None
        if done.returncode:
            said = f":\n{_end_of(done.stderr)}" if capture else ": see above"
            raise ConfigError(f"terraform {words[0]} failed with exit code {done.returncode}{said}")
        return done.stdout or ""

    def _check_version(self) -> None:
        found = re.search(r"v(\d+)\.(\d+)", self._call(["version"], capture=True))
        if found is not None and (int(found[1]), int(found[2])) < _OLDEST:
            raise ConfigError(f"Terraform {found[0][1:]} is too old: 1.10 is needed, whose states in S3 have locks")


def _refresh(module: Path, target: Path) -> None:
    """Copy the module over an earlier copy: what it has no longer goes, what Terraform keeps there stays."""
    wanted = {path.relative_to(module): path for path in _files_of(module)}
    for path in list(_files_of(target)) if target.is_dir() else []:
        name = path.relative_to(target)
        if (
            name not in wanted
            and name.suffix == ".tf"
            and not name.name.endswith("_override.tf")
            and name.name != _BACKEND
        ):
            path.unlink()
    for name, path in wanted.items():
        if name.suffix != ".hcl" or not (target / name).exists():  # `terraform init -upgrade` may have changed the lock
            _replace(target / name, path.read_bytes())


def _files_of(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in _NOT_THE_MODULE:
            yield from _files_of(path)
        elif path.suffix in (".tf", ".tftpl") or path.name == ".terraform.lock.hcl":
            yield path


def _replace(path: Path, content: bytes) -> None:
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    draft.write_bytes(content)
    draft.replace(path)


def _end_of(text: str | None) -> str:
    return "\n".join((text or "").strip().splitlines()[-30:])
