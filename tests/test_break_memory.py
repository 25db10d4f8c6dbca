"""Arrays and hosts that a careless program or a hostile user gives to paged memory: right answers or named errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hexrt import values
from hexrt.errors import TaskFailed


@pytest.mark.parametrize(
    "value",
    [
        np.ones(3, np.longdouble),
        np.ones(3000, np.clongdouble),
        np.longdouble(3),
        np.array(3, np.longdouble),
        np.ones((1,) * 33 + (2,)),
        np.ones((1,) * 33 + (2000,)),
    ],
    ids=["longdouble", "large", "scalar", "no dimensions", "33 dimensions", "33 large ones"],
)
@pytest.mark.parametrize("place", [None, lambda array: 1 << 32], ids=["inline", "placed"])
def test_an_array_that_nobody_could_read_is_refused_where_it_is_put_out(value: Any, place: Any) -> None:
    if value.ndim > 32 and np.lib.NumpyVersion(np.__version__) < "2.0.0":
        pytest.skip("this NumPy has no such arrays")
    with pytest.raises(TaskFailed, match=r"a tensor of .+ cannot be sent"):
        values.encode({"a": [value]}, place)
