"""Run times per (op part, device, size bucket), learnt as they happen.

Owns the estimates. A bucket is one power of two of the op's `work` number. Pure: what is observed is passed in; `dump` and `load` carry
the estimates over a restart.
"""

from __future__ import annotations

import msgspec

PRIOR_NS = 5_000_000.0
"""What a part that was never seen is taken to last."""
WEIGHT = 0.2
"""Of a new observation, once there are more than WARM of them; before that the plain mean."""
WARM = 5

Key = tuple[str, int, str, int]


class Estimate(msgspec.Struct, gc=False, eq=False):
    """The run time of one (op part, device, size bucket). `count` 0: nothing was seen yet, `mean_ns` is a guess."""

    mean_ns: float
    count: int

    def observe(self, took_ns: int) -> None:
        self.count += 1
        if self.count > WARM:
            self.mean_ns += WEIGHT * (took_ns - self.mean_ns)
        elif 2 * took_ns < self.mean_ns:
            self.mean_ns = float(took_ns)  # what came before was a cold start: imports, a model read from disk
        else:
            self.mean_ns += (took_ns - self.mean_ns) / self.count


class CostModel:
    """Exponentially weighted mean run times."""

    def __init__(self) -> None:
        self._estimates: dict[Key, Estimate] = {}

    def estimate(self, op: str, part: int, device: str, work: int) -> Estimate:
        """The estimate for this size, to be read now and given what was observed later; a size never seen borrows from the nearest one."""
        key = op, part, device, work.bit_length()
        found = self._estimates.get(key)
        if found is None:
            found = self._estimates[key] = Estimate(PRIOR_NS, 0)
        if not found.count:
            found.mean_ns = self._guess_ns(key)
        return found

    def _guess_ns(self, key: Key) -> float:
        op, part, device, bucket = key
        near = [(abs(b - bucket), e.mean_ns) for (o, p, d, b), e in self._estimates.items() if (o, p, d) == (op, part, device) and e.count]  # fmt: skip
        return min(near)[1] if near else PRIOR_NS

    def predict_ns(self, op: str, part: int, device: str, work: int) -> int:
        """The expected run time; of the nearest size seen on that device where this size was not, else PRIOR_NS."""
        return int(self.estimate(op, part, device, work).mean_ns)

    def observe(self, op: str, part: int, device: str, work: int, took_ns: int) -> None:
        self.estimate(op, part, device, work).observe(took_ns)

    def best_ns(self, op: str, part: int, devices: tuple[str, ...], work: int) -> float:
        """The least estimate over `devices`; a device where the part was never seen counts only if it was seen nowhere."""
        estimates = [self.estimate(op, part, device, work) for device in devices]
        known = [e.mean_ns for e in estimates if e.mean_ns != PRIOR_NS]
        return min(known, default=float(PRIOR_NS))

    def dump(self) -> bytes:
        return msgspec.msgpack.encode([(*key, e.mean_ns, e.count) for key, e in self._estimates.items() if e.count])

    def load(self, data: bytes) -> None:
        """Takes over what `dump` gave. Raises msgspec.MsgspecError on anything else."""
        for op, part, device, bucket, mean_ns, count in msgspec.msgpack.decode(
            data, type=list[tuple[str, int, str, int, float, int]]
        ):
            self._estimates[op, part, device, bucket] = Estimate(mean_ns, count)
