"""oneDNN's products against float64, and the activation: right, and without a seam between rows."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from kvdrift.generator.attention.cpu_products import (
    OneDNNLinear,
    PackedLinear,
    SeamlessSiLU,
    packed,
    product,
    replace_linear_layers,
)
from kvdrift.generator.attention.threads import torch_threads

# --- Products ---------------------------------------------------------------------------------------------------------


class Quantized(nn.Parameter):
    """Weights that a library holds in fewer bits behind a parameter that calls itself float32."""


@pytest.mark.parametrize("rows", [1, 8, 70])
def test_product(rows: int) -> None:
    """Weights as they are and transposed, with and without bias; sums of 300 terms round below 1e-6 of the largest."""
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((rows, 300), (400, 300), (400,)))
    exact_product = x.double() @ weight.double().t()
    for layout in (weight, weight.t().contiguous().t()):
        for added in (None, bias):
            wanted = exact_product if added is None else exact_product + added.double()
            assert (product(x, layout, added) - wanted).abs().max() < 1e-6 * wanted.abs().max()


def test_large_layers_are_replaced_and_keep_their_weights() -> None:
    layers, x = nn.ModuleDict({
        "large": nn.Linear(256, 256), "unbiased": nn.Linear(256, 300, bias=False), "small": nn.Linear(64, 64),
        "narrow": nn.Linear(256, 256).to(torch.bfloat16), "quantized": nn.Linear(256, 256),
    }), torch.randn(16, 256)  # fmt: skip
    layers["quantized"].weight = Quantized(layers["quantized"].weight.detach())
    replaced = {name: layers[name] for name in ("large", "unbiased")}
    before = {name: (layer.weight.detach().clone(), layer(x).detach()) for name, layer in replaced.items()}
    freed = weakref.ref(replaced.pop("large").weight)
    replaced.clear()
    replace_linear_layers(layers)
    assert freed() is None
    assert [type(layer) for layer in layers.values()] == [PackedLinear, PackedLinear, *[nn.Linear] * 3]
    for name, (weight, output) in before.items():
        assert torch.equal(layers[name].weight, weight)
        assert (layers[name](x) - output).abs().max() < 1e-5


def test_a_head_keeps_the_weights_that_it_shares() -> None:
    layers = nn.ModuleDict({"table": nn.Embedding(300, 256), "head": nn.Linear(256, 300, bias=False)})
    layers["head"].weight = layers["table"].weight
    replace_linear_layers(layers)
    assert type(layers["head"]) is OneDNNLinear
    assert layers["head"].weight is layers["table"].weight


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("rows", "inside"), [(300, 256), (256, 1408), (2048, 64), (64, 4096)])
@pytest.mark.by_default("300-256-2", "64-4096-1")
def test_packed_products_have_the_bits_of_others_whatever_the_number_of_rows(
    rows: int, inside: int, threads: int
) -> None:
    """From two rows on; weights as they are, transposed, and packed."""
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(rows, inside, generator=generator), torch.randn(300, inside, generator=generator)
    with torch_threads(threads):
        whole = product(x, weight)
        for layout in (weight, weight.t().contiguous().t(), packed(weight)):
            for count in (2, 3, 4, 6, 7, 8, 16, 37, 64, 300):
                for part in (slice(count), slice(-count, None)):
                    assert torch.equal(product(x[part], layout), whole[part])


# --- The activation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("width", [77, 101, 512, 4864])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_activation_has_no_seam(width: int, threads: int, dtype: torch.dtype) -> None:
    """Rows of a batch equal the same rows in smaller batches, bitwise, also where threads share the work unevenly."""
    activation = SeamlessSiLU()
    rows = (3 * torch.randn(56, 1, width, generator=torch.Generator().manual_seed(width))).to(dtype)
    with torch_threads(threads):
        whole = activation(rows)
        for count in range(1, 56, 3 if width < 1000 else 11):
            assert torch.equal(activation(rows[:count].contiguous()), whole[:count])
            assert torch.equal(activation(rows[-count:].contiguous()), whole[-count:])


def test_the_activation_is_silu() -> None:
    """Within two units in the last place of float32, and right where the exponential overflows."""
    x = torch.cat([torch.linspace(-80, 80, 10_001), torch.tensor([-1e38, -200.0, 0.0, 200.0, 1e38])])
    exact = x.double() * torch.sigmoid(x.double())
    assert ((SeamlessSiLU()(x) - exact).abs() <= exact.abs() * 2.0**-22 + 1e-37).all()
    assert SeamlessSiLU()(x.bfloat16()).dtype == torch.bfloat16
