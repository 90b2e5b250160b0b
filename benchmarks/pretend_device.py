"""A pretended second device: its tensors compute on the CPU, and refuse operations with tensors of the first device.

Code that mixes devices by mistake fails on a machine with GPUs, and on no other. Here "meta", which torch knows without
a driver, is the name of the second device, and its tensors hold numbers nevertheless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

SECOND = torch.device("meta")
_BETWEEN = {"aten::_to_copy", "aten::copy_"}  # the operations that devices may exchange tensors by


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: None,
    compute_log_sumexp: bool,  # noqa: FBT001 - torch's
    dropout: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    *,
    scale: float | None = None,
) -> Any:
    _hold(bias is None and compute_log_sumexp, "without bias, with the sums")
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    nothing = torch.zeros((), dtype=torch.int64)  # no dropout, so no state of its random numbers
    return (*kernel(query, key, value, dropout, is_causal, scale=scale), nothing, nothing)


def _half_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's
    return_debug_mask: bool = False,  # noqa: FBT001, FBT002
    *,
    scale: float | None = None,
) -> Any:
    _hold(query.dtype != torch.float32 and not return_debug_mask, "a kernel of 16 bits, without a mask to look at")
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    nothing = torch.zeros((), dtype=torch.int64)
    output, mass = kernel(query, key, value, dropout, is_causal, scale=scale)
    return output, mass, nothing, nothing, query.shape[2], key.shape[2], nothing, nothing, nothing


def _hold(holds: bool, what: str) -> None:  # noqa: FBT001 - a condition
    if not holds:
        message = f"attention on the second device: {what}"
        raise RuntimeError(message)


# What the CPU's kernel has another name for.
_ON_THE_CPU = {
    torch.ops.aten._scaled_dot_product_efficient_attention.default: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention.default: _half_attention,
}


class SecondDeviceTensor(Tensor):
    """A tensor that claims to be on the second device; ``held`` is the tensor with its numbers."""

    held: Tensor

    def __new__(cls, held: Tensor) -> Self:
        """Return a tensor on the second device with the same numbers."""
        tensor: Self = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=SECOND,
        )
        tensor.held = held
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:  # torch refuses it to subclasses
            return args[0].cpu().tolist()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _compute(func, args, kwargs or {})


class TwoDevices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within this block, tensors are made on the requested device, and no operation accepts tensors of both devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


def to_second_device(module: nn.Module) -> None:
    """Move a module's parameters and buffers to the second device."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            part._parameters[name] = nn.Parameter(SecondDeviceTensor(parameter.data), requires_grad=False)
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = SecondDeviceTensor(buffer)


def bring_inputs(module: nn.Module, device: torch.device) -> None:
    """Let a module fetch its inputs, as accelerate's hooks do at the border between two devices."""

    def fetch(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        fetched: tuple[Any, Any] = tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        return fetched

    module.register_forward_pre_hook(fetch, with_kwargs=True)


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name
    tensors = list(tensors_of((args, *kwargs.values())))
    places = {isinstance(tensor, SecondDeviceTensor) for tensor in tensors if tensor.dim()}  # numbers may lie anywhere
    if len(places) > 1 and name not in _BETWEEN:
        message = f"{name} takes tensors of both devices"
        raise RuntimeError(message)
    second = any(isinstance(tensor, SecondDeviceTensor) for tensor in tensors)
    if kwargs.get("device") is not None:
        second = torch.device(kwargs["device"]) == SECOND
        kwargs = kwargs | {"device": torch.device("cpu")}
    held = {key: _mapped(value, _held) for key, value in kwargs.items()}
    result = _ON_THE_CPU.get(func, func)(*_mapped(args, _held), **held)
    if name.endswith("_"):  # in place
        return args[0]
    return _mapped(result, SecondDeviceTensor) if second else result


def tensors_of(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments: each argument is a tensor, or a sequence of some."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(part, change) for part in value])
    return value


def _held(tensor: Tensor) -> Tensor:
    return tensor.held if isinstance(tensor, SecondDeviceTensor) else tensor
