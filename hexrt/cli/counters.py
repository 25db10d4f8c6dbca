"""What each counter of `hexrt statistics` counts, in words.

Owns the names. Counters since the daemon's start unless they say what there is now.
"""

from __future__ import annotations

DAEMON = {
    "open_runs": "runs that have not ended, now",
    "open_tasks": "tasks of those runs that have not ended, now",
    "queued_tasks": "tasks that are ready and wait for a device, now",
    "kept_runs": "ended runs kept in memory, now",
    "deadlines": "deadlines and timeouts that are watched, now",
    "held_bytes": "inputs, outputs and tensors of all runs in memory, now",
    "turns": "turns of the daemon's loop",
    "store_pending_bytes": "bytes handed to the store and not yet on disk, now",
    "store_committed": "records of the store that are on disk",
    "uptime_s": "seconds since the start",
    "tensors": "tensors in rings, clients' memory and pages, now",
    "tensor_bytes": "bytes of those",
    "segments": "rings and clients' memory that the daemon has mapped, now",
}
MEMORY = {
    "loaded_pages": "pages brought up from a lower tier, or in from a ring",
    "loaded_bytes": "bytes of those",
    "stored_pages": "pages written to a lower tier",
    "stored_bytes": "bytes of those",
    "relocated_pages": "pages moved within a tier, so that free memory is in one piece",
    "relocated_bytes": "bytes of those",
    "copied_pages": "pages copied for a second writer",
    "copied_bytes": "bytes of those",
    "faults": "pages that could not be read or written",
    "open_moves": "moves that have not ended, now",
}
ENGINE = {
    "waiting": "sequences that wait for pages, now",
    "loading": "sequences whose pages are on their way, now",
    "live": "sequences that are computed, now",
    "parked": "sequences stopped for more urgent ones, now",
    "retained": "sequences kept for steps that go on from them, now",
    "leaving": "sequences that have ended and that a chunk on its way still names, now",
    "frames": "pages that the device could have for the model",
    "frames_free": "of those, the free ones, now",
    "known_pages": "full pages that a prompt with the same beginning would share, now",
    "prompt_tokens": "prompt tokens computed",
    "shared_tokens": "prompt tokens taken over from pages that were there",
    "answer_tokens": "tokens answered",
    "chunks": "chunks of passes that were run",
    "recalled_chunks": "chunks taken back before they began",
    "dropped_sequences": "retained sequences that gave way",
    "preemptions": "sequences stopped for more urgent ones",
    "holds": "retained sequences whose pages were pinned while a step ran",
}
ENDPOINT = {
    "live": "requests that are with the server, now",
    "prompt_tokens": "prompt tokens, as the server counts them",
    "answer_tokens": "tokens answered",
    "answers": "answers that the server gave",
    "failures": "requests that the server did not answer",
}
SERVED = "endpoint:"


def meaning(name: str) -> str:
    """In words; empty for a counter of another version."""
    if name in DAEMON:
        return DAEMON[name]
    if name.startswith("done_"):
        return f"tasks that ended on {name.removeprefix('done_')}"
    if name.startswith("memory_"):
        return MEMORY.get(name.removeprefix("memory_"), "")
    if name.startswith(SERVED):
        return _of_model(name, ENDPOINT, "the server of {model}")
    return _of_model(name, ENGINE, "{model} on {device}")


def _of_model(name: str, counters: dict[str, str], whose: str) -> str:
    """Of a counter DEVICE_MODEL_COUNTER or endpoint:MODEL_COUNTER."""
    found = [counter for counter in counters if name.endswith(f"_{counter}")]
    if not found:
        return ""
    counter = max(found, key=len)  # `frames_free` before what it ends in
    device, _, model = name.removesuffix(f"_{counter}").partition("_")
    return f"{counters[counter]} ({whose.format(model=model or device.removeprefix(SERVED), device=device)})"
