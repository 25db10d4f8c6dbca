"""Runs the Triton kernels in Triton's interpreter, which an environment variable chooses when they are imported: a process of its own.

Reads cases from its standard input, a Python expression a line, and answers with a line of JSON for each.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from hexrt.kernels.triton_attention import TritonAttention
from tests.attention_cases import Case, furthest, make

KERNEL = TritonAttention(product=torch.float32)
"""The interpreter keeps bfloat16 as its bits, and multiplies those: products are in float32 here."""


def alone_and_together(case: Case) -> bool:
    """Whether each row's answer is, bit for bit, what it is when the row is alone in its pass with as wide a table."""
    made = make(case)
    together, _ = made.attend(KERNEL)
    starts = made.tensors.starts.tolist()
    for row in range(len(case.rows)):
        first, last = starts[row], starts[row + 1]
        own = type(made.tensors)(
            made.tensors.slots[first:last], made.tensors.tables[row : row + 1],
            torch.tensor([0, last - first], dtype=torch.int32), made.tensors.ends[row : row + 1], last - first,
        )  # fmt: skip
        single = type(made)(
            case, made.query[first:last], made.key[first:last], made.value[first:last], made.arena, own, made.sinks
        )
        if not torch.equal(single.attend(KERNEL)[0], together[first:last]):
            return False
    return True


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        question, case = eval(line, {"torch": torch, "Case": Case})
        answer = alone_and_together(case) if question == "alone" else furthest(KERNEL, case)
        print(json.dumps(answer), flush=True)
