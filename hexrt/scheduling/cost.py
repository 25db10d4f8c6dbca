"""Run times per (op part, device, size bucket), learnt as they happen.

Owns the estimates. A bucket is one power of two of the op's `work` number. Pure: what is observed is passed in; `dump` and `load` carry
the estimates over a restart.
"""

from __future__ import annotations

import msgspec

PRIOR_NS = 5_000_000
"""What a part that was never seen is taken to last."""
WEIGHT = 0.2
"""Of a new observation, once there are more than 1 / WEIGHT of them; before that the plain mean."""

Key = tuple[str, int, str, int]


class Estimate(msgspec.Struct, gc=False):
    mean_ns: float
    count: int


class CostModel:
    """Exponentially weighted mean run times."""

    def __init__(self) -> None:
        self._estimates: dict[Key, Estimate] = {}
        self._buckets: dict[tuple[str, int, str], list[int]] = {}

    def predict_ns(self, op: str, part: int, device: str, work: int) -> int:
        """The expected run time; of the nearest size seen on that device where this size was not, else PRIOR_NS."""
        bucket = work.bit_length()
        estimate = self._estimates.get((op, part, device, bucket))
        if estimate is None:
            seen = self._buckets.get((op, part, device))
            if not seen:
                return PRIOR_NS
            estimate = self._estimates[op, part, device, min(seen, key=lambda b: abs(b - bucket))]
        return int(estimate.mean_ns)

    def observe(self, op: str, part: int, device: str, work: int, took_ns: int) -> None:
        bucket = work.bit_length()
        estimate = self._estimates.get((op, part, device, bucket))
        if estimate is None:
            self._estimates[op, part, device, bucket] = Estimate(float(took_ns), 1)
            self._buckets.setdefault((op, part, device), []).append(bucket)
            return
        estimate.count += 1
        weight = WEIGHT if estimate.count > 5 else 1.0 / estimate.count
        estimate.mean_ns += weight * (took_ns - estimate.mean_ns)

    def best_ns(self, op: str, part: int, devices: tuple[str, ...], work: int) -> int:
        """The least prediction over `devices`; a device where the part was never seen counts only if it was seen nowhere."""
        seen = [d for d in devices if (op, part, d) in self._buckets]
        return min((self.predict_ns(op, part, d, work) for d in seen), default=PRIOR_NS)

    def dump(self) -> bytes:
        return msgspec.msgpack.encode([(*key, e.mean_ns, e.count) for key, e in self._estimates.items()])

    def load(self, data: bytes) -> None:
        """Takes over what `dump` gave. Raises msgspec.MsgspecError on anything else."""
        for op, part, device, bucket, mean_ns, count in msgspec.msgpack.decode(
            data, type=list[tuple[str, int, str, int, float, int]]
        ):
            self._estimates[op, part, device, bucket] = Estimate(mean_ns, count)
            self._buckets.setdefault((op, part, device), []).append(bucket)
