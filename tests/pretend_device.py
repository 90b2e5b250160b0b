"""A second device on a machine with one: its tensors compute on the CPU and refuse to meet tensors of the first.

What mixes devices by mistake fails on a GPU machine with two, and on none that runs these tests. Here "meta", which
torch knows without a driver, is the second device's name, and its tensors hold numbers all the same.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

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
    assert bias is None
    assert compute_log_sumexp
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
    assert query.dtype != torch.float32, "a kernel of 16 bits"
    assert not return_debug_mask
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    nothing = torch.zeros((), dtype=torch.int64)
    output, mass = kernel(query, key, value, dropout, is_causal, scale=scale)
    return output, mass, nothing, nothing, query.shape[2], key.shape[2], nothing, nothing, nothing


# What the CPU's kernel has another name for.
_ON_THE_CPU = {
    torch.ops.aten._scaled_dot_product_efficient_attention.default: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention.default: _half_attention,
}


class SecondDeviceTensor(Tensor):
    """A tensor that says it lies on the second device; ``held`` is what it holds."""

    held: Tensor

    def __new__(cls, held: Tensor) -> Self:
        """The same numbers on the second device."""
        tensor: Self = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
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
            return args[0].held.tolist()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


class TwoDevices(TorchDispatchMode):
    """Within it, tensors are made on the device that is asked for, and no operation takes both devices' tensors."""

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
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    places = {isinstance(tensor, SecondDeviceTensor) for tensor in tensors if tensor.dim()}  # numbers may lie anywhere
    if len(places) > 1 and name not in _BETWEEN:
        message = f"{name} takes tensors of both devices"
        raise RuntimeError(message)
    second = any(isinstance(tensor, SecondDeviceTensor) for tensor in tensors)
    if kwargs.get("device") is not None:
        second = torch.device(kwargs["device"]) == SECOND
        kwargs = kwargs | {"device": torch.device("cpu")}
    held_args, held_kwargs = tree_map_only(SecondDeviceTensor, lambda tensor: tensor.held, (args, kwargs))
    result = _ON_THE_CPU.get(func, func)(*held_args, **held_kwargs)
    if name.endswith("_"):  # in place
        return args[0]
    return tree_map_only(Tensor, SecondDeviceTensor, result) if second else result
