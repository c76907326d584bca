"""One start of the trainers, as the agent holds it.

Owns the generation's identity while it is being claimed; knows no store.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from harness.core.messages import GenerationInfo


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
    def of(cls, info: GenerationInfo) -> Generation:
        """Return the generation that `info` describes; the inverse of the property `info`."""
        made = cls(info.number, info.run_id, info.nonce, info.parent)
        if info.claimed:
            made.claimed.set()
        return made

    @property
    def info(self) -> GenerationInfo:
        """The generation as it is now, for a message."""
        return GenerationInfo(self.number, self.run_id, self.nonce, self.parent, self.claimed.is_set())
