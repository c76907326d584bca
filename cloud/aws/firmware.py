"""Find out from the firmware whether this machine is an EC2 instance. Asks no service."""

from __future__ import annotations

from pathlib import Path


def is_ec2(root: Path = Path("/")) -> bool:
    """Whether the firmware names Amazon EC2. Also False if a container hides the firmware.

    Source: EC2 user guide, "Detect whether a host is an EC2 instance" (board asset tag and system vendor, on Nitro).
    """
    tag, vendor = (_read(root / "sys/class/dmi/id" / name) for name in ("board_asset_tag", "sys_vendor"))
    return tag.startswith("i-") or "Amazon EC2" in vendor


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
