"""The definition of a fleet: the values of the module's variables, and where they are kept.

Owns how a definition changes: what is given is laid over what is known, and nothing is forgotten unless it is unset. It
is a file of Terraform's (`fleet.auto.tfvars.json`), and a copy of it lies in the run's bucket.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import ConfigError

FILE = "fleet.auto.tfvars.json"
_VARIABLE = re.compile(r'^variable "(\w+)" \{\n(.*?)^\}', re.MULTILINE | re.DOTALL)
_TYPE = re.compile(r"^  type += (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Definition:
    """The variables of one fleet, by their names in terraform/aws/variables-*.tf.

    Attributes:
        values: those that are not left to their defaults.
    """

    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def run(self) -> str:
        """The run's name."""
        return str(self.values["run"])

    def changed(self, given: Mapping[str, Any], unset: Iterable[str]) -> Definition:
        """Return this definition with some values laid over it, and some left to their defaults again."""
        left = set(unset)
        return Definition({name: value for name, value in {**self.values, **given}.items() if name not in left})

    def differences(self, before: Definition) -> list[str]:
        """Return one line for each value that is another one than in `before`."""
        names = sorted({*self.values, *before.values})
        return [
            f"{name}: {_shown(before.values.get(name))} -> {_shown(self.values.get(name))}"
            for name in names
            if self.values.get(name) != before.values.get(name)
        ]

    def to_json(self) -> bytes:
        """Return the file."""
        return (json.dumps(dict(self.values), indent=2, sort_keys=True) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Definition:
        """Read a file of variables. Raises ConfigError, which names `where`."""
        try:
            found = json.loads(data)
        except ValueError as err:
            raise ConfigError(f"{where} is not JSON: {err}") from err
        if not isinstance(found, dict):
            raise ConfigError(f"{where} is not an object of variables")
        return cls(found)


class Variables:
    """The variables that the module has.

    Args:
        module: the folder of the module's variables-*.tf.
    """

    def __init__(self, module: Path) -> None:
        text = "".join(path.read_text() for path in sorted(module.glob("variables-*.tf")))
        found = _VARIABLE.findall(text)
        self._types = {name: type_[1] for name, body in found if (type_ := _TYPE.search(body)) is not None}

    def parse(self, assignments: Sequence[str]) -> dict[str, Any]:
        """Read `NAME=VALUE`: text as it is for a variable that is text, JSON for any other.

        Raises:
            ConfigError: no such variable, or no such value.
        """
        given = {}
        for assignment in assignments:
            name, equals, text = assignment.partition("=")
            self.check([name])
            if not equals:
                raise ConfigError(f"--set {assignment}: NAME=VALUE is expected")
            try:
                given[name] = text if self._types[name] == "string" and text != "null" else json.loads(text)
            except ValueError as err:
                raise ConfigError(f"--set {assignment}: {name} is a {self._types[name]}, in JSON: {err}") from err
        return given

    def check(self, names: Iterable[str]) -> None:
        """Raise ConfigError if there is no variable of one of these names."""
        for name in names:
            if name not in self._types:
                raise ConfigError(f"there is no variable {name!r}. There are {', '.join(sorted(self._types))}")


def _shown(value: object) -> str:
    return "default" if value is None else json.dumps(value)
