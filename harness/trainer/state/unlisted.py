"""Unlisted: what belongs to modules and optimizers, and is not in their state_dicts.

Owns how it is captured and restored: which parameters require a gradient, which modules are in training mode and update
running statistics, gradients that a later step reads, buffers that are not persistent, states of torchmetrics, and
parameter groups that an optimizer got during the training. Only what has changed since the Checkpointer was made is
stored: everything else the program makes again. Tensors that a module keeps as plain attributes are not stored; one
that changes is warned of, once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.core.tree import TensorRef
from harness.errors import StateError
from harness.trainer.digests import weighted_sums
from harness.trainer.state import metrics
from harness.trainer.state.entries import Entries
from harness.trainer.state.gradients import Gradients, Habit, Watched
from harness.trainer.state.kinds import (
    Kind,
    added_groups,
    classify,
    describe_parameters,
    held_by,
    optimizers_in,
    parameter_names,
    plain_keys,
)
from harness.trainer.state.stored import Stored

_MODES: Final = ("training", "track_running_stats")
"""Attributes of modules that a program switches as it trains, as freezing a BatchNorm does, and that are kept."""


class Walk(Protocol):
    """What a capture offers."""

    def tensor(self, tensor: Tensor, path: list[str | int]) -> TensorRef:
        """Return a reference to a tensor that is stored."""
        ...


class Unlisted:
    """What the states of one training have besides their state_dicts. Remembers how it was at the beginning."""

    def __init__(self, states: Mapping[str, object], warn: Callable[[str], None]) -> None:
        """Note how it is now.

        Args:
            states: the states, by name; flat.
            warn: shows a warning to the user.
        """
        self._warn = warn
        self._states = states
        self._modules = {name: _Module(name, state) for name, state in states.items() if isinstance(state, nn.Module)}
        for name, state in states.items():
            for path, module in self._inner(name, state).items():
                self._noted(f"{name}.{path}", module)
        self._groups: dict[str, int] = {}
        self._told_sparse = False
        self.gradients = Gradients(optimizers_in(states.values()))

    def begin(self) -> None:
        """Note that the training begins: parameter groups that are added from now on are added during it."""
        for name, state in self._states.items():
            if isinstance(state, Optimizer):
                self._groups.setdefault(name, len(state.param_groups))

    def remove(self) -> None:
        """Watch no longer."""
        self.gradients.remove()

    # ---- capture ----------------------------------------------------------------------------------------------------

    def capture_module(self, name: str, module: nn.Module, walk: Walk, *, sure: bool) -> dict[str, Any]:
        """Return what a module's node in the tree has besides its state_dict.

        Args:
            name: the module's name.
            module: the module.
            walk: takes the tensors.
            sure: see `Watched.are_read`.

        Raises:
            StateError: it cannot be restored, or a tensor cannot be stored.
        """
        return self._capture(self._modules[name], [name], module, walk, sure=sure)

    def _capture(
        self, noted: _Module, where: list[str | int], module: nn.Module, walk: Walk, *, sure: bool
    ) -> dict[str, Any]:
        params = dict(module.named_parameters(remove_duplicate=False))
        plain = plain_keys(module, params)
        name = ".".join(map(str, where))
        if len(where) == 1 and (change := noted.entry_changed(module, params)) is not None:
            self._warn(
                f"{name}: {change} since Checkpointer(...) was made. A start makes the module as it was then, so that "
                "a resume is refused, unless the program makes this change before its loop again. Give the module its "
                "final form before Checkpointer(...): prune with a mask of ones, give each buffer its shape"
            )
        if (attribute := noted.attribute_changed()) is not None:
            self._warn(
                f"{name}.{attribute} is a tensor that changes, and no state_dict has it: a resume resets it. "
                "Make it a buffer of its module (register_buffer)"
            )
        node: dict[str, Any] = {"requires_grad": noted.flags_changed(params, plain)}
        node |= {mode: noted.modes_changed(module, mode) for mode in _MODES}
        if found := metrics.capture(name, module, walk):
            node["metrics"] = found
        if buffers := noted.buffers_changed(module):
            node["buffers"] = {key: walk.tensor(buffer, [*where, key]) for key, buffer in buffers.items()}
        grads, zeros = self._gradients_of(params, plain, sure=sure)
        dense = {key: grad for key, grad in grads.items() if self._is_dense(key, grad)}
        kept = {key: walk.tensor(grad, [*where, key, "grad"]) for key, grad in dense.items()}
        return node | ({"grads": kept} if kept else {}) | ({"zero_grads": zeros} if zeros else {})

    def capture_object(self, name: str, state: object, walk: Walk, *, sure: bool) -> dict[str, Any]:
        """Return what the node of another object has besides its state_dict: that of the modules that it holds."""
        nodes = {
            path: self._capture(self._noted(f"{name}.{path}", module), [name, path], module, walk, sure=sure)
            for path, module in self._inner(name, state).items()
        }
        return {"modules": nodes} if nodes else {}

    def _noted(self, name: str, module: nn.Module) -> _Module:
        """Return how a module was at the beginning; of one that is met only now, how it is."""
        if name not in self._modules:
            self._modules[name] = _Module(name, module)
        return self._modules[name]

    def _inner(self, name: str, state: object) -> dict[str, nn.Module]:
        """Return the modules that a state which is no module holds, without those that are among the states."""
        if classify(name, state) is not Kind.STATE:
            return {}
        given = [other for other in self._states.values() if isinstance(other, nn.Module)]
        known = {id(each) for module in given for each in module.modules()}
        return {path: module for path, module in held_by(state, nn.Module).items() if id(module) not in known}

    def _gradients_of(
        self, params: Mapping[str, nn.Parameter], plain: Mapping[str, str], *, sure: bool
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Return the gradients to be stored, and the names of those that are zero, or will be before they are read."""
        watched_by = self.gradients.by_parameter()
        stored, zeros = {}, []
        for key, param in params.items():
            watched = watched_by.get(id(param))
            if watched is None or param.grad is None:
                continue
            if watched.are_read(sure=sure) or watched.has_more(param, completed=self.gradients.completed, sure=sure):
                stored[plain[key]] = param.grad
            elif watched.habit is Habit.ZEROED:
                zeros.append(plain[key])
        return stored, zeros

    def _is_dense(self, key: str, grad: Tensor) -> bool:
        if grad.layout is torch.strided:
            return True
        if not self._told_sparse:
            self._told_sparse = True
            self._warn(
                f"the gradient of {key} is sparse, and pending at the end of a step: it is not stored, so a resume is "
                "not bit-identical. Have its optimizer step, or zero it, before the step ends"
            )
        return False

    def capture_optimizer(self, name: str, optimizer: Optimizer) -> dict[str, Any]:
        """Return what an optimizer's node in the tree has besides its state_dict.

        Raises:
            StateError: a parameter group was added during the training that could not be restored.
        """
        groups = self._groups.get(name, len(optimizer.param_groups))
        if len(optimizer.param_groups) > groups:
            named = describe_parameters(optimizer, parameter_names(self._states))
            for index, group in enumerate(named[groups:], groups):
                if not all(isinstance(param, str) for param in group):
                    raise StateError(
                        f"{name}.param_groups[{index}] was added during the training, and its parameters are in no "
                        "module among the states, so it could not be restored: give that module to the Checkpointer, "
                        "or add the group before the training"
                    )
        watched = self.gradients.of(optimizer)
        return {"groups": groups} | ({} if watched is None else _node_of(watched))

    # ---- restore ----------------------------------------------------------------------------------------------------

    def prepare_module(
        self, name: str, module: nn.Module, node: Mapping[str, Any], stored: Stored
    ) -> Callable[[], None]:
        """Have a module's tensors copied with all others; return the call that restores the rest afterwards."""
        noted = self._noted(name, module)
        params = dict(module.named_parameters(remove_duplicate=False))
        by_plain = {plain: params[key] for key, plain in plain_keys(module, params).items()}
        like = next(iter(params.values()), None)
        buffers = {
            key: self._prepare_buffer(module, key, ref, stored, like) for key, ref in node.get("buffers", {}).items()
        }
        put_metrics = metrics.prepare(module, node.get("metrics", {}), stored.copy)
        grads = {key: stored.copy(ref, by_plain[key]) for key, ref in node.get("grads", {}).items() if key in by_plain}

        def restore() -> None:
            put_metrics()
            for put in buffers.values():
                put()
            noted.changed_buffers.update(buffers)
            for mode in node.keys() & set(_MODES):  # older snapshots lack some
                noted.restore_modes(module, mode, node[mode])
            if "requires_grad" in node:
                noted.restore_flags(by_plain, node["requires_grad"])
                _restore_gradients(by_plain, grads, set(node.get("zero_grads", ())))

        return restore

    def prepare_object(self, name: str, state: object, node: Mapping[str, Any], stored: Stored) -> Callable[[], None]:
        """Have the tensors of an object's modules copied with all others; return the call that restores the rest."""
        inner = self._inner(name, state)
        nodes = {path: each for path, each in node.get("modules", {}).items() if path in inner}
        calls = [self.prepare_module(f"{name}.{path}", inner[path], each, stored) for path, each in nodes.items()]

        def restore() -> None:
            for call in calls:
                call()

        return restore

    @contextlib.contextmanager
    def keeping_modes(self) -> Iterator[None]:
        """Context manager around a restore that leaves every module in the mode, training or not, in which it is."""
        modules = [
            child for state in self._states.values() if isinstance(state, nn.Module) for child in state.modules()
        ]
        modes = [child.training for child in modules]
        try:
            yield
        finally:
            for child, mode in zip(modules, modes, strict=True):
                child.training = mode

    def _prepare_buffer(
        self, module: nn.Module, key: str, ref: TensorRef, stored: Stored, like: Tensor | None
    ) -> Callable[[], None]:
        buffers = dict(module.named_buffers(remove_duplicate=False))
        real = {plain: there for there, plain in plain_keys(module, buffers).items()}.get(key, key)
        live, view = buffers.get(real), stored.view(ref)
        if live is not None and (live.shape, live.dtype) == (view.shape, view.dtype) and live.is_contiguous():
            stored.put(ref, live)
            return lambda: None
        owner, _, leaf = real.rpartition(".")
        made = stored.copy(ref, live if live is not None else like)
        return lambda: module.get_submodule(owner).register_buffer(leaf, made, persistent=False)

    def prepare_optimizer(self, name: str, optimizer: Optimizer, node: Mapping[str, Any]) -> None:
        """Add the groups that an optimizer got during the training, and that this start has not added. Changes it."""
        live = len(optimizer.param_groups)
        self._groups[name] = node.get("groups", live)
        params = self._parameters()
        for group in added_groups(node, live, params):
            optimizer.add_param_group({"params": [params[param] for param in group]})
        watched = self.gradients.of(optimizer)
        if watched is not None and "habit" in node:
            watched.restore(pending=bool(node["pending"]), habit=Habit(node["habit"]))

    def _parameters(self) -> dict[str, Tensor]:
        """Return all parameters of all modules, by the names by which an optimizer's node knows them."""
        names = parameter_names(self._states)
        modules = (state for state in self._states.values() if isinstance(state, nn.Module))
        return {names[id(param)]: param for module in modules for param in module.parameters()}


class _Module:
    """A module at the beginning, and what has changed since."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        params = dict(module.named_parameters(remove_duplicate=False))
        self._flags = {plain: params[key].requires_grad for key, plain in plain_keys(module, params).items()}
        self._changed_flags: set[str] = set()
        self._entries: Entries | None = Entries(module)
        self._modes_in_order = {mode: _values(module, mode) for mode in _MODES}
        self._modes = {
            mode: {plain: getattr(child, mode) for plain, child in _plain_modules(module) if hasattr(child, mode)}
            for mode in _MODES
        }
        self._buffers = {key: (weakref.ref(buffer), _version(buffer)) for key, buffer in _buffers(module).items()}
        self._sums = weighted_sums({key: buffer for key, buffer in _buffers(module).items() if _is_dense(buffer)})
        self.changed_buffers: set[str] = set()
        self._attributes = [_Attribute(path, child) for path, child in module.named_modules()]
        self._attributes = [noted for noted in self._attributes if noted.values]
        self._in_ddp = any(isinstance(child, nn.parallel.DistributedDataParallel) for child in module.modules())

    def flags_changed(self, params: Mapping[str, nn.Parameter], plain: Mapping[str, str]) -> dict[str, bool]:
        """Return `requires_grad` of the parameters for which it has ever changed."""
        for key, param in params.items():
            if self._flags.get(plain[key], param.requires_grad) != param.requires_grad:
                self._changed_flags.add(plain[key])
        if self._changed_flags and self._in_ddp:
            raise StateError(
                f"{self._name}: requires_grad of {min(self._changed_flags)} has changed since "
                "DistributedDataParallel was made, which decides then which gradients it averages; a resumed program "
                "would make it otherwise. Let these parameters require gradients from the beginning, with a learning "
                "rate of 0 until they are trained"
            )
        return {plain[key]: param.requires_grad for key, param in params.items() if plain[key] in self._changed_flags}

    def restore_flags(self, params: Mapping[str, Tensor], stored: Mapping[str, bool]) -> None:
        """Set `requires_grad` as it was stored, and elsewhere as it was at the beginning."""
        self._changed_flags |= stored.keys() & self._flags.keys()
        for key, param in params.items():
            wanted = stored.get(key, self._flags.get(key, param.requires_grad))
            if param.requires_grad != wanted:
                param.requires_grad_(wanted)

    def modes_changed(self, module: nn.Module, mode: str) -> dict[str, bool]:
        """Return a mode of the modules in which it differs from what it was at the beginning."""
        if _values(module, mode) == self._modes_in_order[mode]:
            return {}
        noted = self._modes[mode]
        return {
            plain: bool(getattr(child, mode))
            for plain, child in _plain_modules(module)
            if plain in noted and noted[plain] != getattr(child, mode, noted[plain])
        }

    def restore_modes(self, module: nn.Module, mode: str, stored: Mapping[str, bool]) -> None:
        """Set a mode as it was stored, and elsewhere as it was at the beginning.

        Of each module alone: its `train` may do more, and that is in the snapshot already.
        """
        noted = self._modes[mode]
        for plain, child in _plain_modules(module):
            here = getattr(child, mode, None)
            wanted = stored.get(plain, noted.get(plain, here))
            if here is not None and here != wanted:
                setattr(child, mode, wanted)

    def attribute_changed(self) -> str | None:
        """Return the name of a tensor that is a plain attribute and has changed, once; `None` if there is none."""
        changed = next((key for noted in self._attributes if (key := noted.changed()) is not None), None)
        if changed is not None:
            self._attributes = []
        return changed

    def entry_changed(self, module: nn.Module, params: Mapping[str, Tensor]) -> str | None:
        """Return in words the first change of the state_dict's entries that no start could take, once; else `None`."""
        changed = None if self._entries is None else self._entries.changed(module, params)
        if changed is not None:
            self._entries = None
        return changed

    def buffers_changed(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the buffers that are not in the state_dict, and have ever changed."""
        buffers = _buffers(module)
        plain = plain_keys(module, buffers)
        unchanged = {}
        for key, buffer in buffers.items():
            noted = self._buffers.get(key)
            if noted is None or noted[0]() is not buffer or noted[1] != _version(buffer):
                self.changed_buffers.add(plain[key])
            elif key in self._sums and plain[key] not in self.changed_buffers:
                unchanged[key] = buffer
        # One that is written to through `.data` has the same version.
        sums = weighted_sums(unchanged)
        self.changed_buffers |= {plain[key] for key, value in sums.items() if value != self._sums[key]}
        return {plain[key]: buffer for key, buffer in buffers.items() if plain[key] in self.changed_buffers}


class _Attribute:
    """The tensors that one module keeps as plain attributes, at the beginning."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self._module = path, weakref.ref(module)
        self.values = {
            key: (id(value), _version(value)) for key, value in vars(module).items() if _accumulates(module, key, value)
        }

    def changed(self) -> str | None:
        """Return the name of the first one that has changed; `None` if there is none."""
        module = self._module()
        for key, before in self.values.items() if module is not None else ():
            value: Any = getattr(module, key, None)
            if _accumulates(module, key, value) and (id(value), _version(value)) != before:
                return f"{self.path}.{key}" if self.path else key
        return None


def _accumulates(module: nn.Module | None, key: str, value: object) -> bool:
    """Whether an attribute may be a tensor that is carried from step to step, in no state_dict."""
    if metrics.is_metric(module):  # its states are captured
        return False
    return isinstance(value, Tensor) and value.grad_fn is None


def _restore_gradients(params: Mapping[str, Tensor], stored: Mapping[str, Tensor], zeros: set[str]) -> None:
    for key, param in params.items():
        grad = stored.get(key)
        if grad is None and key not in zeros:
            param.grad = None
        elif param.grad is None or param.grad.layout is not torch.strided:
            param.grad = torch.zeros_like(param, requires_grad=False) if grad is None else grad
        elif grad is None:
            param.grad.zero_()
        else:  # in place: DistributedDataParallel may have made it a view of a bucket
            param.grad.copy_(grad)


def _plain_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and all in it, by their paths without those of wrappers; a wrapper has that of what it wraps."""
    modules = {f"{path}.": child for path, child in module.named_modules(remove_duplicate=False)}
    plain = plain_keys(module, modules)
    yield from ((plain[path].strip("."), child) for path, child in modules.items())


def _values(module: nn.Module, mode: str) -> list[Any]:
    return [vars(child).get(mode) for child in module.modules()]  # getattr is slow where a module has none


def _node_of(watched: Watched) -> dict[str, Any]:
    return {"pending": watched.pending, "habit": watched.habit.value}


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are not persistent."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, child in module.named_modules(remove_duplicate=False)
        for name, buffer in child.named_buffers(recurse=False)
        if name in child._non_persistent_buffers_set
    }


def _is_dense(tensor: Tensor) -> bool:
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized)
    return plain and tensor.numel() > 0


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
