"""Options, defaults and units: defaults < harness.toml < HARNESS_* < flags, validated once, printed at start.

Owns every read of an environment variable in the harness. Used by the command line, and by a Checkpointer without
`harness run`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import tempfile
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from harness.core.snapshot import check_run_name
from harness.errors import ConfigError

DEFAULT_STORE = ".harness"
CONFIG_FILE = "harness.toml"
_ONLY_FLAGS = frozenset({"fresh", "continue_", "from_", "run_named"})  # in a file, `fresh` would affect every start
SOCKET_VARIABLE = "HARNESS_SOCKET"  # set by the agent for its child
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
OFF_VARIABLE = "HARNESS"  # HARNESS=off makes every Checkpointer inert


@dataclass(frozen=True)
class Help:
    """Help text of a setting, and the heading that the help lists it under."""

    text: str
    heading: str


_WHERE, _WHEN, _KEPT, _NOTICE, _LIMITS, _S3 = (
    "The run and its store", "How often to save", "What to keep", "Notices", "Limits", "S3"
)  # fmt: skip
_WATCHED = "Programs that save by themselves"


@dataclass(frozen=True)
class Settings:
    """All settings of a run. Durations are in seconds, sizes in bytes. A setting with `Help` is also an option.

    Attributes:
        run_named: whether the user chose the run's name; otherwise it is the script's.
        overlap: copy parameters and state of torch optimizers during the next step, instead of at the boundary.
        runtime_dir: directory of the sockets on which agents of this host listen.
        shared: new files in directory stores get the permissions that the umask leaves, instead of the user's alone.
    """

    store: Annotated[str, Help("Durable store: a directory, or s3://bucket/prefix. Default: ./.harness", _WHERE)]
    run: Annotated[
        str, Help("Name of the run. Default: the script's name; to look at a run, the only run in the store", _WHERE)
    ]
    run_named: bool = True
    local: Annotated[
        str | None,
        Help(
            "Directory of local tiers, on a fast disk. Default: none for a directory store; with S3 the instance's own "
            "NVMe disk, or ~/.cache/harness",
            _WHERE,
        ),
    ] = None
    every_s: Annotated[float, Help("Seconds between snapshots: into the local tier, if there is one", _WHEN)] = 60.0
    durable_every_s: Annotated[
        float, Help("Seconds between snapshots into the store, if there is a local tier too", _WHEN)
    ] = 300.0
    every_steps: Annotated[int | None, Help("Also take a snapshot at each multiple of this step", _WHEN)] = None
    keep_last: Annotated[int, Help("Snapshots to keep in the store", _KEPT)] = 3
    keep_every: Annotated[int | None, Help("Keep the snapshots at multiples of this step forever", _KEPT)] = None
    keep_local: Annotated[int, Help("Snapshots to keep in the local tier", _KEPT)] = 2
    slots: Annotated[
        int | None, Help("Images of the state in shared memory. Default: 2, or 1 below 32 GB of memory", _LIMITS)
    ] = None
    overlap: bool = False
    grace_s: Annotated[
        float, Help("Seconds from a SIGTERM, or a drain file without a number, to the deadline", _NOTICE)
    ] = 30.0
    drain_file: Annotated[str | None, Help("File that counts as a notice as soon as it exists", _NOTICE)] = None
    max_crashes: Annotated[
        int, Help("Restarts in place, at most, after crashes in a row without progress", _LIMITS)
    ] = 3
    fresh: Annotated[bool, Help("Start at step 0, and ignore the snapshots of the run", _WHERE)] = False
    continue_: Annotated[bool, Help("Continue a run that its program stopped early", _WHERE)] = False
    from_: Annotated[
        str | None, Help("Go back to this snapshot, by its name or step, and set all newer ones aside", _WHERE)
    ] = None
    handover_s: Annotated[
        float, Help("Seconds of silence after which a previous start of this run counts as dead", _LIMITS)
    ] = 150.0
    upload_bytes_s: Annotated[
        float | None, Help("Upload limit while training, in bytes per second; no limit after a notice", _LIMITS)
    ] = None
    s3_endpoint: Annotated[str | None, Help("URL of an S3-compatible store. Default: AWS", _S3)] = None
    s3_sse: Annotated[
        str | None, Help("Encryption of every object: AES256 or aws:kms. Default: the bucket's own", _S3)
    ] = None
    s3_kms_key_id: Annotated[str | None, Help("Key for --s3-sse aws:kms. Default: the account's own", _S3)] = None
    metadata: Annotated[str, Help('Base URL of the instance metadata service, or "off"', _NOTICE)] = (
        "http://169.254.169.254"
    )
    log_format: Annotated[
        str | None,
        Help(
            "Lines on stderr: text (sentences) or logfmt (key=value). Default: text on a terminal, else logfmt",
            "Output",
        ),
    ] = None
    watch: Annotated[
        str | None, Help("Take what the program itself saves in this directory as snapshots", _WATCHED)
    ] = None
    watch_as: Annotated[
        str | None,
        Help("What it saves there: the name of an adapter, or a .toml file. Default: it is recognized", _WATCHED),
    ] = None
    runtime_dir: str = ""
    shared: bool = False

    def __post_init__(self) -> None:
        try:
            check_run_name(self.run)
        except ValueError as err:
            raise ConfigError(str(err)) from err
        for name in ("every_s", "durable_every_s", "grace_s", "handover_s", "upload_bytes_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be more than 0, not {value}")
        if "://" in (self.local or ""):
            raise ConfigError(f"local must be a directory on a disk of this machine, not {self.local}")
        if self.log_format not in (None, "text", "logfmt"):
            raise ConfigError(f"log_format must be text or logfmt, not {self.log_format!r}")
        if self.s3_sse not in (None, "AES256", "aws:kms"):
            raise ConfigError(f"s3_sse must be AES256 or aws:kms, not {self.s3_sse!r}")
        if self.s3_kms_key_id is not None and self.s3_sse != "aws:kms":
            raise ConfigError("s3_kms_key_id needs s3_sse = aws:kms")
        for name in ("every_steps", "keep_last", "keep_every", "keep_local"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.slots is not None and not 1 <= self.slots <= 8:
            raise ConfigError(f"slots must be from 1 to 8, not {self.slots}")
        if self.fresh and self.continue_:
            raise ConfigError("--fresh starts at step 0, and --continue continues the run: use one of them")
        if self.fresh and self.from_ is not None:
            raise ConfigError("--fresh starts at step 0, and --from at a snapshot: use one of them")
        if self.watch_as is not None and self.watch is None:
            raise ConfigError("watch_as says what the program saves in a directory: name that by watch")
        if self.max_crashes < 0:
            raise ConfigError("max_crashes must not be negative")

    @property
    def store_identity(self) -> str:
        """Identity of the store on this host: the same S3 URL at another endpoint is another store."""
        elsewhere = self.s3_endpoint is not None and "://" in self.store
        return f"{self.s3_endpoint} {self.store}" if elsewhere else self.store

    @property
    def local_tier(self) -> str | None:
        """Directory below `local` for this store's local tier: runs of one name in two stores are two runs.

        `None` without a local tier. What a program saves by itself is on a local disk already.
        """
        if self.local is None or self.watch is not None:
            return None
        words = re.sub(r"[^A-Za-z0-9]+", "-", self.store_identity).strip("-")[-40:].strip("-")
        told_apart = hashlib.blake2b(os.fsencode(self.store_identity), digest_size=4).hexdigest()
        return str(Path(self.local) / f"{words}-{told_apart}")

    @property
    def slot_disk(self) -> Path | None:
        """Directory for a slot that does not fit into memory: `local`, else the store, or `None` if that is a URL."""
        if self.local is not None:
            return Path(self.local)
        return None if "://" in self.store else Path(self.store)

    def to_json(self) -> str:
        """Return the settings as text, for another process of the harness."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Parse the text that `to_json` returned."""
        return cls(**json.loads(text))

    def remembered(self) -> dict[str, str]:
        """Return the settings that a later start of the same run compares with its own."""
        names = ("every_s", "durable_every_s", "every_steps", "keep_last", "keep_every", "keep_local")
        return {name: str(getattr(self, name)) for name in names}


@dataclass(frozen=True)
class Option:
    """A setting as a command-line option.

    Attributes:
        flag: its name, e.g. --every-s.
        kind: type of its value.
        help: its help text.
        heading: heading that the help lists it under.
    """

    flag: str
    kind: type
    help: str
    heading: str


def _options() -> dict[str, Option]:
    hints, kinds, options = typing.get_type_hints(Settings, include_extras=True), _kinds(), {}
    for field in dataclasses.fields(Settings):
        hint = hints[field.name]
        for shown in getattr(hint, "__metadata__", ()):
            flag = f"--{field.name.strip('_').replace('_', '-')}"
            default = f". Default: {field.default:g}" if type(field.default) in (int, float) else ""
            options[field.name] = Option(flag, kinds[field.name], shown.text + default, shown.heading)
    return options


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str], cwd: Path, *, script: str | None) -> Settings:
    """Return the settings in force.

    Args:
        flags: options given on the command line; `None` values count as not given.
        environ: the environment: HARNESS_STORE, ... and AWS's own variables for the metadata service and S3.
        cwd: where harness.toml and relative directories are looked up.
        script: file name of the training script, which names the run if nothing else does; `None` without a script.

    Raises:
        ConfigError: an invalid value, an unknown key in harness.toml, or no name for the run.
    """
    values: dict[str, Any] = _metadata_from(environ) | _endpoint_from(environ)
    values |= _from_file(cwd / CONFIG_FILE)
    for name, kind in _kinds().items():
        text = environ.get(f"HARNESS_{name.upper()}")
        if text is not None and name not in _ONLY_FLAGS:
            word = _WORDS.get(text.lower(), text) if kind is bool else text
            values[name] = _convert(word, kind, f"HARNESS_{name.upper()}")
    values |= {name: value for name, value in flags.items() if value is not None}
    if not values.get("run"):
        values["run"] = _name_from(script)
        values["run_named"] = False
    values.setdefault("store", DEFAULT_STORE)
    values["store"] = _absolute(values["store"], cwd)
    if values.get("watch"):
        values["watch"] = _absolute(values["watch"], cwd)
    if str(values.get("watch_as") or "").endswith(".toml"):
        values["watch_as"] = _absolute(values["watch_as"], cwd)
    if values.get("local"):
        values["local"] = _absolute(values["local"], cwd)
    elif "://" in values["store"]:
        values["local"] = str(_default_local(environ))
    if "runtime_dir" not in values:
        values["runtime_dir"] = str(_runtime_dir(environ))
    return Settings(**values)


def here() -> Path:
    """Return the current directory. Raises ConfigError if it no longer exists."""
    try:
        return Path.cwd()
    except OSError as err:
        raise ConfigError(f"the current directory cannot be used: {err.strerror}; change to another one") from err


def is_off(environ: Mapping[str, str]) -> bool:
    """Whether HARNESS=off asks every Checkpointer to do nothing."""
    return environ.get(OFF_VARIABLE, "").lower() in ("off", "0", "no", "false")


def check_alone(environ: Mapping[str, str]) -> None:
    """Raise ConfigError in one of several ranks: a command that starts all of them was started by each."""
    size = environ.get("WORLD_SIZE", "")
    if size.isdecimal() and int(size) > 1:
        raise ConfigError(
            f"WORLD_SIZE is {size}: this command was started once for each rank. Start the launcher with it: "
            "harness run -- torchrun --standalone --nproc-per-node N train.py"
        )


def _name_from(script: str | None) -> str:
    if script is None:
        raise ConfigError("this run has no name: pass --run NAME (or set HARNESS_RUN, or run= in Python)")
    return re.sub(r"[^A-Za-z0-9_.=+-]", "-", Path(script).stem).lstrip(".-=+") or "run"


def _absolute(location: str, cwd: Path) -> str:
    if not location:
        raise ConfigError("a store or a local tier has an empty name: is a variable unset?")
    if re.match(r"[\w+.-]+://[^/]", location):
        return location.rstrip("/")
    if re.match(r"[\w+.-]+:/", location):  # a typo, e.g. s3:/bucket; a directory of that name is not durable
        raise ConfigError(f"{location}: a store is a directory or s3://bucket/prefix")
    try:
        return os.path.normpath(cwd / Path(location).expanduser())
    except RuntimeError as err:
        raise ConfigError(f"{location}: there is no such home directory") from err


def _from_file(path: Path) -> dict[str, Any]:
    try:
        if not path.exists():
            return {}
        if not path.is_file():  # reading a pipe would block
            raise ConfigError(f"{path} is not a file")
        table = tomllib.loads(path.read_text("utf-8-sig"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise ConfigError(f"{path}: {err}") from err
    kinds = {name: kind for name, kind in _kinds().items() if name not in _ONLY_FLAGS}
    unknown = sorted(set(table) - set(kinds))
    if unknown:
        raise ConfigError(f"{path}: unknown option {unknown[0]!r}; the options are: {', '.join(sorted(kinds))}")
    return {name: _convert(value, kinds[name], f"{path}: {name}") for name, value in table.items()}


def _kinds() -> dict[str, type]:
    """Return the plain type of each setting: float for `float | None`."""
    kinds = {}
    for name, hint in typing.get_type_hints(Settings).items():
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        kinds[name] = next(option for option in options if option is not type(None))
    return kinds


OPTIONS: Mapping[str, Option] = _options()
"""The command-line options, by the names of their settings."""


def _convert(value: Any, kind: type, where: str) -> Any:
    if isinstance(value, list | dict) or (kind is int and isinstance(value, float)):
        raise ConfigError(f"{where}: expected {kind.__name__}, got {value!r}")
    if kind is bool or isinstance(value, bool):
        if kind is bool and isinstance(value, bool):
            return value
        raise ConfigError(f"{where}: expected {kind.__name__}, got {value!r}")
    try:
        return kind(value)
    except (TypeError, ValueError) as err:
        raise ConfigError(f"{where}: expected {kind.__name__}, got {value!r}") from err


def _metadata_from(environ: Mapping[str, str]) -> dict[str, Any]:
    if environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return {"metadata": "off"}
    if endpoint := environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT"):
        return {"metadata": endpoint.rstrip("/")}
    if environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "").lower() == "ipv6":
        return {"metadata": "http://[fd00:ec2::254]"}
    return {}


def _endpoint_from(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the endpoint in AWS's own variables: one bucket name at two endpoints is two stores on this host."""
    if environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return {}
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    return {"s3_endpoint": endpoint} if endpoint else {}


def _default_local(environ: Mapping[str, str]) -> Path:
    if (mount := instance_store()) is not None:
        return mount / "harness"
    cache = environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(cache) / "harness"


def instance_store(
    *,
    mounts: Path = Path("/proc/self/mounts"),
    by_id: Path = Path("/dev/disk/by-id"),
    block: Path = Path("/sys/class/block"),
) -> Path | None:
    """Return the writable mount of the instance's own NVMe disk, alone or in a RAID; `None` if there is none."""
    try:
        disks = {link.resolve().name for link in by_id.glob("nvme-Amazon_EC2_NVMe_Instance_Storage_*")}
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return None
    for device, mount, *_ in lines if disks else []:
        name = Path(device).resolve().name
        members = {name, *(member.name for member in (block / name / "slaves").glob("*"))}
        if members & disks and os.access(mount, os.W_OK):
            return Path(mount)
    return None


def _runtime_dir(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_RUNTIME_DIR")
    if base and len(base) < 60 and Path(base).is_dir():  # the socket's path must stay below 108 bytes
        return Path(base) / "harness"
    try:
        return Path(tempfile.gettempdir()) / f"harness-{os.getuid()}"
    except FileNotFoundError as err:
        raise ConfigError(f"{err.strerror}: name one for sockets and locks with HARNESS_RUNTIME_DIR") from err
