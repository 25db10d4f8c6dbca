"""The command `hexrt models`: what each model is, where it is loaded and what it does there, and what all weights take.

Owns the form; everything comes from one `ModelList`.
"""

from __future__ import annotations

import click

from hexrt.cli.memory import size
from hexrt.cli.options import Shared, shared_options
from hexrt.cli.output import one_line, print_json, print_table
from hexrt.protocol.messages import ModelList
from hexrt.protocol.models import ModelPlace, ModelStatus

NONE = (
    "no model is configured: name one in the config ([models.NAME] with a path or an endpoint), or put its folder into "
    "daemon.models_dir; `make setup` prepares some in .models"
)


@click.command()
@shared_options
def models(shared: Shared) -> int:
    """List the models that LLM steps may name, where each is loaded, and what their weights take.

    Paths and URLs are told in full to root, the daemon's own user and its admins alone.
    """
    with shared.connect() as client:
        found = client.models()
    if shared.json:
        print_json(found)
    elif not found.models:
        print(NONE)
    else:
        print_models(found)
    return 0


def print_models(found: ModelList) -> None:
    print_table(
        ("model", "kind", "from", "architecture", "parameters", "dtype", "weights", "kv", "context", "page"),
        [
            (
                m.name, m.kind, m.source, m.architecture or "-", number(m.parameters), m.dtype or "-", m.weights or "-", m.kv_dtype or "-",
                str(m.context_tokens or "-"), size(m.page_bytes) if m.page_bytes else "-",
            )
            for m in found.models
        ],
    )  # fmt: skip
    print()
    print_table(
        ("model", "device", "state", "weights", "live", "waiting", "retained", "last used", "tokens/s"),
        [_row(m, place) for m in found.models for place in m.places],
    )
    said = [f"{m.name} on {p.device} is {p.state}: {p.why}" for m in found.models for p in m.places if p.why]
    said += [f"weights on {b.device} take {size(b.used_bytes)} of {size(b.budget_bytes)}" for b in found.budgets]
    if said:
        print()
    for text in said:
        print(one_line(text))


def _row(model: ModelStatus, place: ModelPlace) -> tuple[str, ...]:
    return (
        model.name, place.device, place.state, size(place.weight_bytes) if place.weight_bytes else "-",
        f"{place.live} of {place.limit}" if place.limit else str(place.live), str(place.waiting), str(place.retained),
        ago(place.used_s), f"{place.tokens_per_s:.1f}" if place.tokens_per_s else "-",
    )  # fmt: skip


def number(count: int) -> str:
    """Of parameters, in three digits."""
    if not count:
        return "-"
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            return f"{count / unit:.3g}{name}" if count < 1000 * unit else f"{count // unit}{name}"
    return str(count)


def ago(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds // unit:.0f} {name} ago"
    return f"{seconds:.0f} s ago"
