"""Frozen: of a model whose base is never trained, as PEFT's adapters have one, only what is trained.

Owns which tensors those are, and the proof that the base is the same. Knows no framework: PEFT is not imported.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from harness.errors import StateError
from harness.trainer.staging.shares import byte_sums


def has_frozen_base(model: Any) -> bool:
    """Whether a model has adapters of PEFT, and a base under them that they leave as it is."""
    return bool(getattr(model, "peft_config", None)) and any(not param.requires_grad for param in model.parameters())


class Trainable(nn.Module):
    """The trained part of a module, under the names that the module gives it. Holds the module, and is not part of it.

    What requires no gradient now is taken for the base, for good.
    """

    def __init__(self, whole: nn.Module) -> None:
        """Look at a module. Its tensors stay its own."""
        super().__init__()
        self._held = (whole,)  # not as a submodule
        self._frozen = {
            name for name, param in whole.named_parameters(remove_duplicate=False) if not param.requires_grad
        }

    @property
    def whole(self) -> nn.Module:
        """The module."""
        return self._held[0]

    def base_sum(self) -> int:
        """Return a sum over the bytes of the base: equal for equal ones. Reads all of it, once."""
        with torch.no_grad():
            sums = byte_sums(dict(sorted(self._base())))
        total = 0
        for name in sorted(sums):  # in turn, so that two exchanged tensors show
            total = (total * 31 + sums[name]) % 2**63
        return total

    def _base(self) -> Iterator[tuple[str, nn.Parameter]]:
        every = self.whole.named_parameters(remove_duplicate=False)
        return ((name, param) for name, param in every if name in self._frozen)

    def _is_frozen(self, key: str) -> bool:
        if key in self._frozen:
            return True
        owner, _, _ = key.rpartition(".")
        return owner in self._frozen  # what a quantized parameter keeps beside itself

    # ---- as a module ------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state_dict without the base. Raises StateError if a part of that is trained by now."""
        thawed = next((name for name, param in self._base() if param.requires_grad), None)
        if thawed is not None:
            raise StateError(
                f"{thawed} is trained now, and was not when the training began: only what was trained then is stored. "
                "Unfreeze it before the training begins"
            )
        found = self.whole.state_dict(*args, **kwargs)
        kept = OrderedDict((key, value) for key, value in found.items() if not self._is_frozen(key))
        if hasattr(found, "_metadata"):
            kept._metadata = found._metadata  # type: ignore[attr-defined]
        return kept

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what `state_dict` returned; the base stays as it is."""
        loaded = self.whole.load_state_dict(state_dict, strict=False, assign=assign)
        missing = [key for key in loaded.missing_keys if not self._is_frozen(key)]
        if strict and (missing or loaded.unexpected_keys):
            raise RuntimeError(f"missing: {missing}; unexpected: {loaded.unexpected_keys}")
        return loaded

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that are not of the base."""
        every = self.whole.named_parameters(prefix, recurse, remove_duplicate)
        return ((name, param) for name, param in every if not self._is_frozen(name.removeprefix(f"{prefix}.")))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the module's buffers."""
        return self.whole.named_buffers(prefix, recurse, remove_duplicate)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the module and what it consists of."""
        found: Iterator[tuple[str, nn.Module]] = self.whole.named_modules(memo, prefix, remove_duplicate)
        return found

    def get_submodule(self, target: str) -> nn.Module:
        """Return a part of the module."""
        return self.whole.get_submodule(target)
