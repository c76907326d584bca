from __future__ import annotations

from pathlib import Path

import pytest

from cloud.aws.firmware import is_ec2


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"sys_vendor": "Amazon EC2\n", "board_asset_tag": "i-0123456789abcdef0\n"}, True),
        ({"board_asset_tag": "i-0123456789abcdef0\n"}, True),
        ({"sys_vendor": "QEMU\n", "board_asset_tag": "\n"}, False),
        ({}, False),
    ],
)
def test_the_firmware_of_an_instance_names_ec2(tmp_path: Path, files: dict[str, str], expected: bool) -> None:
    folder = tmp_path / "sys/class/dmi/id"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)

    assert is_ec2(tmp_path) is expected
