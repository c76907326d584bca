from __future__ import annotations

import dataclasses
import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from harness.config.settings import Settings, is_off, resolve
from harness.errors import ConfigError, ExitCode


def settle(cwd: Path, flags: dict[str, Any] | None = None, script: str | None = "train.py", **environ: str) -> Settings:
    return resolve(flags or {}, environ, cwd, script=script)


def write(cwd: Path, text: str) -> None:
    (cwd / "harness.toml").write_text(text)


# ---- precedence -----------------------------------------------------------------------------------------------------


def test_nothing_told_is_the_default_store_here_and_the_scripts_name(tmp_path: Path) -> None:
    found = settle(tmp_path)

    assert (found.store, found.run, found.run_named, found.local) == (str(tmp_path / ".harness"), "train", False, None)
    assert (found.every_s, found.keep_last, found.metadata) == (60.0, 3, "http://169.254.169.254")


def test_flags_beat_the_environment_beats_the_file_beats_the_defaults(tmp_path: Path) -> None:
    write(tmp_path, 'run = "file"\nevery_s = 1\nkeep_last = 1\nkeep_local = 5\n')

    found = settle(
        tmp_path, {"run": "flag", "slots": None}, HARNESS_RUN="environ", HARNESS_EVERY_S="2", HARNESS_KEEP_LAST="2"
    )

    assert (found.run, found.every_s, found.keep_last, found.keep_local) == ("flag", 2.0, 2, 5)
    assert found.run_named is True


def test_a_flag_that_was_not_given_hides_nothing(tmp_path: Path) -> None:
    assert settle(tmp_path, {"run": None}, HARNESS_RUN="environ").run == "environ"


def test_a_run_named_in_the_file_is_named_by_the_user(tmp_path: Path) -> None:
    write(tmp_path, 'run = "mine"')

    assert settle(tmp_path).run_named is True


# ---- values that cannot be ------------------------------------------------------------------------------------------


def test_an_unknown_key_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    write(tmp_path, 'shop = "/mnt"')

    with pytest.raises(ConfigError, match=r"harness\.toml: unknown option 'shop'; the options are: .*store"):
        settle(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "store = [1]",
        "store = {a = 1}",
        "store = true",
        "every_s = []",
        'every_s = "soon"',
        "every_s = true",
        "every_s = nan",
        "every_s = 0",
        "every_s = -1",
        "every_steps = 2.5",
        "every_steps = 0",
        "keep_last = 0",
        "keep_every = 0",
        "slots = 0",
        "slots = 9",
        "max_crashes = -1",
        "fresh = 1",
        "run_named = true",
        'run = "a/b"',
        "run = ",
        "[run]",
        "\x00",
    ],
)
def test_a_value_that_cannot_be_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path, text)

    with pytest.raises(ConfigError) as refusal:
        settle(tmp_path)

    assert refusal.value.exit_code == ExitCode.USAGE == 64


@pytest.mark.parametrize(
    ("name", "value"),
    [("HARNESS_EVERY_S", "soon"), ("HARNESS_EVERY_S", "nan"), ("HARNESS_SLOTS", "1.5"), ("HARNESS_KEEP_LAST", "0"),
     ("HARNESS_RUN", "..")],
)  # fmt: skip
def test_a_variable_that_cannot_be_is_refused(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ConfigError):
        settle(tmp_path, **{name: value})


def test_a_bad_value_names_where_it_stands(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="HARNESS_EVERY_S: expected float, got 'soon'"):
        settle(tmp_path, HARNESS_EVERY_S="soon")
    write(tmp_path, "slots = []")
    with pytest.raises(ConfigError, match=r"harness\.toml: slots: expected int"):
        settle(tmp_path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "harness.toml").mkdir()

    with pytest.raises(ConfigError, match=r"harness\.toml"):
        settle(tmp_path)


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "run"),
    [
        ("train.py", "train"),
        ("/a/b/train.py", "train"),
        ("my training.py", "my-training"),
        (".hidden.py", "hidden"),
        ("übung.py", "bung"),
        ("v1.2.py", "v1.2"),
        ("...", "run"),
        ("日本.py", "run"),
    ],
)
def test_a_run_is_named_after_its_script(tmp_path: Path, script: str, run: str) -> None:
    assert settle(tmp_path, script=script).run == run


def test_without_a_script_there_is_no_name_to_guess(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--run NAME"):
        settle(tmp_path, script=None)


# ---- places ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("store", "found"),
    [("ckpt", "{cwd}/ckpt"), ("./a/../b/", "{cwd}/b"), ("/mnt/x", "/mnt/x"), ("~/x", "{home}/x"),
     ("s3://bucket/prefix/", "s3://bucket/prefix")],
)  # fmt: skip
def test_a_store_is_absolute(tmp_path: Path, store: str, found: str) -> None:
    expected = found.format(cwd=tmp_path, home=os.environ["HOME"])

    assert settle(tmp_path, {"store": store}).store == expected


@pytest.mark.parametrize("store", ["s3:/bucket/prefix", "s3://", "s3:///prefix", "host:/export"])
def test_a_slip_of_the_pen_is_no_directory(tmp_path: Path, store: str) -> None:
    with pytest.raises(ConfigError, match="a store is a directory or s3://bucket/prefix"):
        settle(tmp_path, {"store": store})

    assert settle(tmp_path, {"store": f"./{store}"}).store.startswith(str(tmp_path))


def test_the_local_tier_is_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="s3://bucket/x"):
        settle(tmp_path, {"store": "s3://bucket/prefix", "local": "s3://bucket/x"})


def test_a_home_that_nobody_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="~nobody-has-this-name"):
        settle(tmp_path, {"store": "~nobody-has-this-name/x"})


def test_a_directory_store_has_no_local_tier_unless_it_is_named(tmp_path: Path) -> None:
    assert settle(tmp_path, {"store": "x"}).local is None
    assert settle(tmp_path, {"store": "x", "local": "y"}).local == str(tmp_path / "y")


def test_s3_has_a_local_tier_in_the_users_cache_by_default(tmp_path: Path) -> None:
    assert settle(tmp_path, {"store": "s3://b/p"}, XDG_CACHE_HOME="/cache").local == "/cache/harness"
    assert settle(tmp_path, {"store": "s3://b/p"}).local == str(Path.home() / ".cache" / "harness")
    assert settle(tmp_path, {"store": "s3://b/p", "local": "/nvme"}).local == "/nvme"


def test_each_store_has_a_local_tier_of_its_own(tmp_path: Path) -> None:
    """Two runs of one name, in two stores, deleted and quarantined each other's snapshots."""
    one, again, other = (
        settle(tmp_path, {"store": store, "local": str(tmp_path / "local")})
        for store in ("s3://bucket/one", "s3://bucket/one", "s3://bucket/other")
    )
    elsewhere = dataclasses.replace(one, s3_endpoint="http://127.0.0.1:9000")

    assert one.local_tier == again.local_tier
    assert len({one.local_tier, other.local_tier, elsewhere.local_tier}) == 3
    assert Path(one.local_tier or "").parent == tmp_path / "local"
    assert Path(one.local_tier or "").name.startswith("s3-bucket-one-")


@pytest.mark.parametrize(
    ("environ", "endpoint"),
    [
        ({"AWS_ENDPOINT_URL": "http://all"}, "http://all"),
        ({"AWS_ENDPOINT_URL": "http://all", "AWS_ENDPOINT_URL_S3": "http://s3"}, "http://s3"),
        ({"AWS_ENDPOINT_URL_S3": "http://s3", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}, None),
        ({"AWS_ENDPOINT_URL_S3": "http://s3", "HARNESS_S3_ENDPOINT": "http://ours"}, "http://ours"),
    ],
)
def test_an_endpoint_of_aws_s_own_variables_is_another_store_too(
    tmp_path: Path, environ: dict[str, str], endpoint: str | None
) -> None:
    bucket, directory = (settle(tmp_path, {"store": store}, **environ) for store in ("s3://b/p", "/store"))

    assert bucket.store_identity == ("s3://b/p" if endpoint is None else f"{endpoint} s3://b/p")
    assert directory.store_identity == "/store"


@pytest.mark.parametrize("store", ["s3://b/" + "long-" * 60, "/mnt/é/ü", "/", "s3://b/../x"])
def test_a_local_tier_is_one_directory_whatever_its_store_is_called(tmp_path: Path, store: str) -> None:
    local = dataclasses.replace(settle(tmp_path), store=store, local=str(tmp_path)).local_tier

    made = Path(local or "")
    assert made.parent == tmp_path
    assert len(made.name) < 60
    made.mkdir()


def test_agents_listen_in_the_users_runtime_directory_if_its_path_is_short(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()

    assert settle(tmp_path, XDG_RUNTIME_DIR="/tmp").runtime_dir == "/tmp/harness"
    assert settle(tmp_path, XDG_RUNTIME_DIR=str(long)).runtime_dir.endswith(f"/harness-{os.getuid()}")
    assert settle(tmp_path, XDG_RUNTIME_DIR="/nowhere").runtime_dir.endswith(f"/harness-{os.getuid()}")


@pytest.mark.parametrize(
    ("environ", "metadata"),
    [
        ({"AWS_EC2_METADATA_DISABLED": "true"}, "off"),
        ({"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://localhost:1338/"}, "http://localhost:1338"),
        ({"AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE": "IPv6"}, "http://[fd00:ec2::254]"),
        ({"AWS_EC2_METADATA_DISABLED": "true", "HARNESS_METADATA": "http://x"}, "http://x"),
    ],
)
def test_awss_own_variables_are_heard(tmp_path: Path, environ: dict[str, str], metadata: str) -> None:
    assert settle(tmp_path, **environ).metadata == metadata


# ---- the rest -------------------------------------------------------------------------------------------------------


def test_settings_survive_the_way_to_another_process() -> None:
    settings = Settings(store="/x", run="r", local="/y", every_steps=5, slots=2, fresh=True)

    assert Settings.from_json(settings.to_json()) == settings


def test_what_a_later_start_is_compared_with_is_text() -> None:
    assert Settings(store="/x", run="r").remembered() == {
        "every_s": "60.0",
        "durable_every_s": "300.0",
        "every_steps": "None",
        "keep_last": "3",
        "keep_every": "None",
        "keep_local": "2",
    }


@pytest.mark.parametrize(
    ("value", "off"), [("off", True), ("OFF", True), ("0", True), ("no", True), ("on", False), ("", False)]
)
def test_harness_off_is_off(value: str, off: bool) -> None:
    assert is_off({"HARNESS": value}) is off
    assert is_off({}) is False


def test_a_file_of_settings_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "harness.toml").write_bytes(b"\xef\xbb\xbfevery_s = 7.0\n")
    assert settle(tmp_path).every_s == 7.0


def test_a_pipe_is_no_file_of_settings(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "harness.toml")
    with pytest.raises(ConfigError, match="is not a file"):
        settle(tmp_path)


def test_where_nothing_can_be_written_a_runtime_directory_that_is_named_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)

    assert settle(tmp_path, HARNESS_RUNTIME_DIR="/run/mine").runtime_dir == "/run/mine"
    with pytest.raises(ConfigError, match="HARNESS_RUNTIME_DIR"):
        settle(tmp_path)


def test_a_store_whose_name_is_no_utf_8_is_told_apart_like_any_other(tmp_path: Path) -> None:
    one, other = (settle(tmp_path, {"store": f"/store-{byte}", "local": "/local"}) for byte in ("\udcff", "\udcfe"))
    assert one.local_tier != other.local_tier
