"""The module, really applied: `terraform` in a copy of it, against an account of the tests' own.

Owns the copy, the override that leads the provider to the account, and what terraform said. The folder of one of these
can be copied together with its account: then both are as they were, and go on apart.

The provider comes from the folder that the environment's TF_PLUGIN_DIR names, laid out as `terraform init -plugin-dir`
wants it; without it `terraform init` fetches it from where it is set up to.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.aws_account import REGION, ROOT, Account

PLUGINS = "TF_PLUGIN_DIR"
VARIABLES = "tests.auto.tfvars.json"
OVERRIDE = 'provider "aws" {\n  s3_use_path_style = true\n}\n'  # the rest is said by the environment
NOT_THE_MODULE = shutil.ignore_patterns(".terraform", "*.tfstate*", "*.tfvars", "tests")  # the lock file is obeyed
NO_PROVIDER = ("Failed to query available provider packages", "Failed to install provider")


_RUNNING: list[subprocess.Popen[str]] = []


def kill_all() -> None:
    """Kill every terraform that this process runs, with its providers; for one that is about to end."""
    for process in _RUNNING:
        os.killpg(process.pid, signal.SIGKILL)


class Unavailable(Exception):
    """There is no terraform here, or it has no provider."""


@dataclass(frozen=True)
class Said:
    code: int
    output: str
    errors: str

    @property
    def words(self) -> str:
        """All of it as one line, without the frame and the line breaks that terraform puts into its messages."""
        return " ".join(f"{self.output}\n{self.errors}".replace("│", " ").split())


class TerraformFailed(Exception):
    """It ended with another code than it should have."""


class Terraform:
    """The module in `folder`/terraform, applied to `account` with the variables that it was made with."""

    def __init__(self, folder: Path, account: Account, module: str = "terraform") -> None:
        self.account = account
        self.module = folder / module
        self._folder = folder

    @classmethod
    def prepare(
        cls, folder: Path, account: Account, variables: Mapping[str, object], module: str = "terraform"
    ) -> Terraform:
        """Copy the modules, with the scripts that they embed, and initialise `module`. Raises Unavailable."""
        if shutil.which("terraform") is None:
            raise Unavailable("terraform is not installed")
        made = cls(folder, account, module)
        shutil.copytree(ROOT / "terraform", folder / "terraform", ignore=NOT_THE_MODULE)
        shutil.copytree(ROOT / "scripts", folder / "scripts")
        (made.module / "tests_override.tf").write_text(OVERRIDE)
        made.set(**variables)
        made.init()
        return made

    def copy(self, folder: Path) -> Terraform:
        """The same state, variables and account; what is done to the one is not done to the other."""
        shutil.copytree(self._folder, folder, symlinks=True)
        return Terraform(folder, self.account.copy())

    def init(self) -> None:
        plugins = os.environ.get(PLUGINS)
        said = self.run("init", *([f"-plugin-dir={plugins}"] if plugins else []), codes=(0, 1))
        if said.code and not plugins and any(problem in said.words for problem in NO_PROVIDER):
            raise Unavailable(f"terraform init finds no provider, and {PLUGINS} is not set\n{said.words}")
        if said.code:
            raise TerraformFailed(said.words)

    def set(self, **variables: object) -> None:
        """Give these variables another value, for everything that follows."""
        path = self.module / VARIABLES
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | variables, indent=2))

    def apply(self, *options: str) -> None:
        self.run("apply", "-auto-approve", *options)

    def plan(self, *options: str, codes: tuple[int, ...] = (0, 2)) -> Said:
        """0: there is nothing to do; 2: there is; 1: it cannot be done."""
        return self.run("plan", "-detailed-exitcode", *options, codes=codes)

    def destroy(self, *options: str, codes: tuple[int, ...] = (0,)) -> Said:
        return self.run("destroy", "-auto-approve", *options, codes=codes)

    def outputs(self) -> dict[str, Any]:
        return {name: said["value"] for name, said in json.loads(self.run("output", "-json").output).items()}

    def run(self, command: str, *options: str, codes: tuple[int, ...] = (0,)) -> Said:
        """Run it to its end. Raises TerraformFailed where it ends with none of `codes`."""
        process = subprocess.Popen(
            ["terraform", command, *options],
            cwd=self.module,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        with process:
            _RUNNING.append(process)
            try:
                output, errors = process.communicate()
            except BaseException as err:
                os.killpg(process.pid, signal.SIGKILL)  # its providers too
                said, log = process.communicate()[0], self._log.read_text(errors="replace")
                err.add_note(f"terraform {command} had said:\n{said[-3000:]}\nthe end of its log:\n{log[-6000:]}")
                raise
            finally:
                _RUNNING.remove(process)
        if process.returncode not in codes:
            raise TerraformFailed(f"terraform {command} ended with {process.returncode}:\n{output}\n{errors}")
        return Said(process.returncode, output, errors)

    @property
    def _log(self) -> Path:
        """What terraform and its provider do, call by call: all that is known of one that waits for ever."""
        return self._folder / "terraform.log"

    def _environment(self) -> dict[str, str]:
        theirs = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "TF_VAR_"))}
        log = {"TF_LOG": "DEBUG", "TF_LOG_PATH": str(self._log)}
        ours = {**log, "TF_IN_AUTOMATION": "1", "TF_INPUT": "0", "TF_CLI_ARGS": "-no-color", "CHECKPOINT_DISABLE": "1"}
        return {**theirs, **ours, **self.account.environment(REGION)}
