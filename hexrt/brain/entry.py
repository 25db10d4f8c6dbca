"""One model on one device: its engine, whether its weights are there, and which tasks are which of its sequences.

Owned by `brain.engines`; what is of loading is changed by `brain.loading`. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hexrt.brain.models import LoadedModel
from hexrt.brain.sequences import Key
from hexrt.errors import ErrorRecord
from hexrt.llm.batch import Engine, Outcome
from hexrt.runtime.entities import Run, Task


@dataclass(eq=False, slots=True)
class Entry:
    """`waiting` are tasks that wait for the weights, `live` those whose sequences the engine has; `early` came before its decode task was there.

    The engine outlives the weights and the host process, for the sequences that it retains.
    """

    model: str
    engine: Engine | None = None
    loaded: bool = False  # the host that is there has the weights
    draining: bool = False  # they make way for another model's once what the engine has is done
    load_command: int = 0
    unload_command: int = 0
    about: LoadedModel | None = None  # what a host said when it last loaded it
    waiting: list[Task] = field(default_factory=list)
    live: dict[Key, Task | None] = field(default_factory=dict)
    early: dict[Key, list[Outcome]] = field(default_factory=dict)
    page_bytes: int = 0
    kept: dict[Key, tuple[Run, int]] = field(
        default_factory=dict
    )  # retained for steps that go on from this one of the run
    chunks: dict[int, int] = field(default_factory=dict)  # command -> tokens, of chunks that are with the host
    slowest_ns: float = 0.0  # a token, of the slowest chunk so far
    busy_ns: int = 0  # of all chunks
    stopping: list[tuple[Task, ErrorRecord]] = field(default_factory=list)  # a chunk on its way names their sequences

    @property
    def admits(self) -> bool:
        """Whether a new sequence may go to the engine now."""
        return self.loaded and not self.draining and not self.unload_command

    @property
    def is_idle(self) -> bool:
        """Whether nobody reads the weights now, or will before another task comes."""
        return (
            self.loaded and (self.draining or not self.waiting) and (self.engine is None or self.engine.is_idle)
        )  # fmt: skip
