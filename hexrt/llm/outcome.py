"""What `llm.batch` tells the daemon about its sequences.

A sequence's outcomes come in this order: Prefilled, Emitted any number of times, Ended; or Refused at any point, as the last. A request
without sampling ends with Prefilled. A cancelled one has no further outcome. Pure.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import msgspec

from hexrt.core import TokenLogprob
from hexrt.errors import ErrorRecord


class Prefilled(msgspec.Struct, frozen=True):
    """The prompt is in the pages. Comes again when a request is added again after its device was lost.

    `pages_loaded`: shared pages that had to be brought up first.
    """

    key: Hashable
    start_ns: int
    end_ns: int
    pages_loaded: int = 0


class Emitted(msgspec.Struct, frozen=True):
    """Answer ids from position `first` on, and the text that became certain; text lags behind ids by what may become a stop string."""

    key: Hashable
    first: int
    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class Ended(msgspec.Struct, frozen=True):
    """The whole answer. `finish`: "stop" or "length"."""

    key: Hashable
    finish: str
    ids: tuple[int, ...]
    text: str
    start_ns: int
    end_ns: int
    logprobs: tuple[TokenLogprob, ...] = ()


class Refused(msgspec.Struct, frozen=True):
    """This sequence alone failed; its pages are given back."""

    key: Hashable
    error: ErrorRecord


Outcome = Prefilled | Emitted | Ended | Refused


@dataclass(slots=True)
class Counters:
    """What an engine has done so far; `EngineStatistics` says what each means."""

    prompt_tokens: int = 0
    shared_tokens: int = 0
    answer_tokens: int = 0
    chunks: int = 0
    recalled_chunks: int = 0
    dropped_sequences: int = 0
    preemptions: int = 0


class EngineStatistics(msgspec.Struct, frozen=True):
    waiting: int
    loading: int  # their pages are on their way
    live: int
    parked: int  # stopped for more urgent ones
    retained: int
    leaving: int  # ended, and a chunk on its way names them
    frames: int  # that the device could have for this model's pages
    frames_free: int
    known_pages: int  # by the tokens that they hold: for whoever has the same beginning
    prompt_tokens: int  # prefilled
    shared_tokens: int  # taken over from a parent's pages instead
    answer_tokens: int
    chunks: int
    recalled_chunks: int
    dropped_sequences: int  # retained ones that gave way
    preemptions: int
    holds: int  # retained ones whose pages were pinned while a step ran
