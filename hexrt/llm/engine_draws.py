"""Draws on the CPU by the compiled kernel: what `engine_sampling.sample` computes, in one call, with some 30 microseconds a greedy row and 300
a row that is cut, of 49,152 tokens.

Owns the call's record and scratch memory, so it is used on one thread. Where the two kinds of sums round apart a draw may differ from
`sample`'s: each is the same at every run, and a host uses one of them.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hexrt.errors import Unavailable
from hexrt.kernels.native import load
from hexrt.llm.engine_sampling import Drawn, Draws, sample

POINTERS = "logits", "random", "step", "inverse", "numbers", "top_k", "top_p", "min_p", "penalised", "slots", "penalty", "seen", "masked", "bits", "reported", "tokens", "logprobs", "ids", "scratch"  # fmt: skip
ORDER = (
    "logits", "rows", "vocabulary", "random", "step", "inverse", "numbers", "randoms", "passes", "cut", "top_k", "top_p", "min_p",
    "penalised", "slots", "penalty", "seen", "penalties", "masked", "bits", "masks", "words", "reported", "reports", "top", "tokens",
    "logprobs", "ids", "scratch", "threads",
)  # fmt: skip

GIVEN = (  # by the draws
    "random", "step", "inverse", "numbers", "top_k", "top_p", "min_p", "penalised", "slots", "penalty", "seen", "masked", "bits",
    "reported",
)  # fmt: skip

OTHER_VERSION = "the compiled kernels are of another version: run `make setup`"


class Call(ctypes.Structure):
    """hx_draws of kernels/cpu/sample.c."""

    _fields_ = [(name, ctypes.c_void_p if name in POINTERS else ctypes.c_int64) for name in ORDER]


class NativeSampler:
    """Raises Unavailable where the compiled kernels are not to be had."""

    def __init__(self) -> None:
        native = load()
        if native.library is None:
            raise Unavailable(native.why)
        library = native.library
        if not hasattr(library, "hx_sample_run"):
            raise Unavailable(OTHER_VERSION)
        self._run, self._needs = library.hx_sample_run, library.hx_sample_scratch
        self._run.argtypes, self._run.restype = (ctypes.c_void_p,), None
        self._needs.argtypes, self._needs.restype = (ctypes.c_int64,) * 3, ctypes.c_int64
        library.hx_sample_bytes.restype = ctypes.c_int64
        if library.hx_sample_bytes() != ctypes.sizeof(Call):
            raise Unavailable(OTHER_VERSION)
        self._threads = native.threads
        self._call = Call()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def __call__(self, logits: Tensor, draws: Draws) -> Drawn:
        """One token for each row of `logits` [rows, vocabulary], float32, which it leaves alone."""
        logits = logits.contiguous()
        rows, size = logits.shape
        threads = torch.get_num_threads() if self._threads else 1
        reports, top = len(draws.reported), min(draws.top, size)
        drawn = Drawn(
            torch.empty((2, rows), dtype=torch.int64),
            torch.empty((reports, 1 + top), dtype=torch.float32),
            torch.empty((reports, top), dtype=torch.int64),
        )
        if not rows:
            return drawn
        need = self._needs(rows, size, threads)
        if need > len(self._scratch):
            self._scratch = torch.empty(need, dtype=torch.uint8)
        call = self._call
        call.rows, call.vocabulary, call.threads, call.top = rows, size, threads, top
        call.randoms, call.cut, call.passes = len(draws.random), len(draws.cut), draws.numbers.shape[1]
        call.penalties, call.masks, call.reports = len(draws.penalised), len(draws.masked), reports
        call.words = draws.bits.shape[1]
        call.scratch = self._scratch.data_ptr()
        call.tokens, call.logprobs, call.ids = drawn.tokens.data_ptr(), drawn.logprobs.data_ptr(), drawn.ids.data_ptr()
        call.logits = logits.data_ptr()
        for name in GIVEN:
            value: Tensor | None = getattr(draws, name)
            setattr(call, name, None if value is None else value.data_ptr())
        self._run(ctypes.addressof(call))
        return drawn


class Sampler:
    """Draws by the kernel where it is to be had, else in plain torch. `why`: why it is not."""

    def __init__(self, device: torch.device) -> None:
        self._native: NativeSampler | None = None
        self.why = ""
        try:
            self._native = NativeSampler() if device.type == "cpu" else None
        except Unavailable as error:
            self.why = error.message

    def __call__(self, logits: Tensor, draws: Draws) -> Drawn:
        return sample(logits, draws) if self._native is None else self._native(logits, draws)
