"""`harness status`: what a run is doing now, or how it ended."""

from __future__ import annotations

import os
from typing import Any

from harness.cli.options import TO_FIND, Json, settings_of, with_settings
from harness.cli.output import patience, print_fields, print_json


@with_settings(*TO_FIND)
def status(flags: dict[str, Any], as_json: Json = False) -> None:
    """Show what a run is doing now, or how it ended: step, local step, durable step, bytes pending."""
    from harness.core import events
    from harness.inspect.status import status as status_of
    from harness.node.platform import describe_fleet, fleet_words

    with patience(flags["store"]):
        settings = settings_of(flags)
        found = status_of(settings)
        fleet = describe_fleet(settings.metadata, os.environ)
    if as_json:
        print_json(found | {"fleet": fleet})
    else:
        restart = events.Restarted(**found["restart"]).words() if found.get("restart") else None
        print_fields(found | {"restart": restart, "fleet": fleet_words(fleet)})
