"""Lightning: `Trainer(callbacks=[HarnessCallback()])` of `lightning` survives an interruption, and goes on bit for bit.

`lightning_fit.py` has all of it; this is that under the name of the package.
"""

from __future__ import annotations

from harness import requirements
from harness.integrations.lightning_fit import Fit

with requirements.needed("lightning"):
    from lightning.pytorch.callbacks import Callback


class HarnessCallback(Fit, Callback):  # noqa: D101  it has that of Fit
    __doc__ = Fit.__doc__
