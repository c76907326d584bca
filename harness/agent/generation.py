"""One start of the trainers, as the agent holds it, and as it travels to a trainer or to another agent of this host.

Owns the generation's identity while it is being claimed; knows neither stores nor messages' framing.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Generation:
    """One start of the trainers. `number` may still rise until `claimed` is set; published remotely only after.

    Attributes:
        number: the generation's number.
        run_id: identity of the run.
        nonce: this claimant's.
        parent: the snapshot it resumed from; `None` for step 0, or while it is not known yet.
        claimed: set once the claim stands in the store.
    """

    number: int
    run_id: str
    nonce: str
    parent: str | None = None
    claimed: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of(cls, fields: Mapping[str, object]) -> Generation:
        """The inverse of `fields`."""
        parent = fields["parent"]
        number, run_id, nonce = int(str(fields["number"])), str(fields["run_id"]), str(fields["nonce"])
        made = cls(number, run_id, nonce, None if parent is None else str(parent))
        if fields["claimed"]:
            made.claimed.set()
        return made

    def fields(self) -> dict[str, object]:
        """As it travels in a message."""
        return {
            "number": self.number,
            "run_id": self.run_id,
            "nonce": self.nonce,
            "parent": self.parent,
            "claimed": self.claimed.is_set(),
        }
