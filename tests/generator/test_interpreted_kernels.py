"""The kernels for CUDA give the values of their plain forms, by Triton's interpreter, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from fixtures.house import ROOT

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> Any:
    """Return the comparison of all kernels, made in one process."""
    done = subprocess.run(
        [sys.executable, "-m", "fixtures.interpreted_kernels"], capture_output=True, text=True, check=False,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_attention_is_the_softmax_over_all_entries(found: Any) -> None:
    assert found["attention"] == []


def test_operations_between_products_are_those_of_torch(found: Any) -> None:
    """In 16 bits sums in another order move a rounding here and there, by one unit in the last place, or two.

    The residual stream is equal unless something normed was added to it.
    """
    bounds = {"torch.float32": 1e-6, "torch.float16": 2**-9}
    assert len(found["operations"]) == 10
    for dtype, deviations in found["operations"]:
        assert max(deviations) < bounds[dtype]
        assert deviations[2] == 0.0


def test_sums_over_pairs_of_distributions_are_those_of_torch(found: Any) -> None:
    assert len(found["laws"]) == 3
    for deviation, equal, near, infinite in found["laws"]:
        assert abs(near) < 1e-3
        assert infinite
        assert deviation < 1e-6, "blocks are summed in another order, in the dtype of the distributions"
        assert equal == [0.0] * 9, "equal distributions are not apart at all"


def test_what_is_tried_at_first_holds(found: Any) -> None:
    assert found["faults"] == [None, None]
