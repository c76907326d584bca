"""Lightning: `Trainer(callbacks=[HarnessCallback()])` of `lightning` survives an interruption, and goes on bit for bit.

`lightning_fit.py` has all of it; this is that under the name of the package.
"""

from __future__ import annotations

from lightning.pytorch.callbacks import Callback

from harness.integrations.lightning_fit import Fit


class HarnessCallback(Fit, Callback):  # noqa: D101  it has that of Fit
    __doc__ = Fit.__doc__
