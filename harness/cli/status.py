"""`harness status`: what a run is doing now, or how it ended."""

from __future__ import annotations

import os
from typing import Any

from harness.cli.options import TO_FIND, Json, settings_of, with_settings
from harness.cli.output import patience, print_fields, print_json


@with_settings(*TO_FIND)
def status(flags: dict[str, Any], as_json: Json = False) -> None:
    """Show on one screen whether a run is safe, whether it is moving, and what a notice would cost now."""
    from cloud.aws.firmware import is_ec2
    from harness.inspect.screen import screen
    from harness.inspect.status import status as status_of
    from harness.node.platform import describe_fleet, fleet_words

    with patience(flags["store"]):
        settings = settings_of(flags)
        found = status_of(settings)
        fleet = describe_fleet(settings.metadata, os.environ)
    if as_json:
        print_json(found | {"fleet": fleet})
        return
    words = fleet_words(fleet) if is_ec2() or fleet["group"] is not None else None
    print_fields(dict(screen(found, words)))
