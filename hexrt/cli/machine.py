"""Commands about the daemon itself: devices, statistics, shutdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from hexrt.cli.counters import meaning
from hexrt.cli.options import Shared, shared_options
from hexrt.cli.output import print_json, print_table
from hexrt.protocol.messages import DeviceStatus


@click.command()
@shared_options
def devices(shared: Shared) -> int:
    """List the devices: what each is, what it does, and why one or its memory is missing or degraded."""
    with shared.connect() as client:
        found = client.devices()
    if shared.json:
        print_json(found)
        return 0
    print_table(
        ("device", "state", "running", "queued", "done", "about"),
        [(d.name, d.state, str(d.running), str(d.queued), str(d.done), about(d)) for d in found],
    )
    return 0


def about(device: DeviceStatus) -> str:
    """Why it is missing, else what it is; first what is wrong with its memory."""
    said = device.why or facts_text(device.facts)
    return "; ".join(part for part in (device.memory and f"memory: {device.memory}", said) if part)


def facts_text(facts: Mapping[str, Any]) -> str:
    """What a host says of its device: yes and no as words, last why something is missing; tables are left out."""
    said = [
        (key if value else f"no {key}") if isinstance(value, bool) else f"{key} {value}"
        for key, value in facts.items()
        if key != "why" and not isinstance(value, Mapping)
    ]
    return "; ".join(part for part in (", ".join(said), str(facts.get("why", ""))) if part)


@click.command()
@shared_options
def statistics(shared: Shared) -> int:
    """Print the daemon's counters."""
    with shared.connect() as client:
        values = client.statistics()
    if shared.json:
        print_json(values)
    else:
        print_table(
            ("counter", "value", "what it counts"),
            [(name, f"{value:.10g}", meaning(name)) for name, value in sorted(values.items())],
        )
    return 0


@click.command()
@click.option("--now", is_flag=True, help="Do not let running steps end first.")
@shared_options
def shutdown(shared: Shared, now: bool) -> int:
    """Stop the daemon. Only root and the daemon's own user may."""
    with shared.connect() as client:
        client.shutdown(drain=not now)
    if shared.json:
        print_json({"draining": not now})
    else:
        print("hexrtd is stopping" if now else "hexrtd is stopping, once running steps have ended")
    return 0
