"""The command `hexrt memory`: tiers, links, what moved, tensors and who holds the most, in eighty columns.

Owns the form; everything comes from one `MemoryReport`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

import click

from hexrt.cli.options import Shared, shared_options
from hexrt.cli.output import counted, one_line, print_json, print_table
from hexrt.protocol.messages import LinkStatus, MemoryReport, TierStatus

WIDTH = 80
MOST_NAME = 10
UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
STATES = {"unstarted": "unused"}


@click.command()
@shared_options
def memory(shared: Shared) -> int:
    """Show the tiers of memory, what moves between them, and the runs that hold most.

    Of other users' runs only root, the daemon's own user and its admins are told.
    """
    with shared.connect() as client:
        report = client.memory()
    if shared.json:
        print_json(report)
    else:
        print_report(report)
    return 0


def print_report(report: MemoryReport) -> None:
    print_table(
        ("tier", "level", "size", "used", "free", "pages", "dirty", "pinned", "state"),
        [
            (
                short(t.name), t.level, size(t.bytes), size(t.used_bytes), size(t.free_bytes), count(t.pages), count(t.dirty_pages),
                count(t.pinned_pages), STATES.get(t.state, t.state),
            )
            for t in report.tiers
        ],
    )  # fmt: skip
    _print_texts(_notes(report))
    print_table(
        ("tier", "free run", "frag", "in", "out", "evicted", "given up", "moving", "faults"),
        [
            (
                short(t.name), size(t.largest_free_bytes), f"{t.fragmentation:.0%}", size(t.bytes_in), size(t.bytes_out),
                count(t.evictions), count(t.discards), count(t.moving_pages), count(t.faults),
            )
            for t in report.tiers
        ],
    )  # fmt: skip
    print()
    if report.links:
        print_table(("from", "to", "bandwidth", "latency", "copies seen"), [_link(link) for link in report.links])
        print()
    _print_texts(_totals(report))
    if report.holders:
        print_table(
            ("run", "name", "state", "uid", "pages", "size", "tensors", "size"),
            [
                (
                    h.run.hex()[:8], short(h.name), h.state, str(h.uid), count(h.pages), size(h.page_bytes), count(h.tensors),
                    size(h.tensor_bytes),
                )
                for h in report.holders
            ],
        )  # fmt: skip


def _print_texts(texts: Iterable[str]) -> None:
    for text in texts:
        print(textwrap.fill(one_line(text), WIDTH, subsequent_indent="  "))
    print()


def trouble(tiers: Iterable[TierStatus]) -> list[str]:
    """A sentence for each tier that is not as it should be."""
    return [f"{tier.name} is {tier.state}: {tier.why}" for tier in tiers if tier.why]


def _notes(report: MemoryReport) -> list[str]:
    """What the states do not say."""
    unused = [f"{t.name} starts when it is needed: its file is made then" for t in report.tiers if t.state == "unstarted"]  # fmt: skip
    kinds = {"reserved": "reserved huge pages", "transparent": "huge pages where the kernel has them"}
    kind = kinds.get(report.host_pages, f"{report.host_pages or 'unknown'} pages")
    why = f" ({report.host_pages_why})" if report.host_pages_why else ""
    return [*trouble(report.tiers), *unused, f"host has {kind}{why}"]


def _link(link: LinkStatus) -> tuple[str, ...]:
    seen = count(link.copies) if link.copies else "none, a guess"
    return (
        short(link.source),
        short(link.target),
        f"{size(link.bytes_per_s)}/s",
        f"{link.latency_ns / 1e3:.1f} us",
        seen,
    )


def _totals(report: MemoryReport) -> list[str]:
    moved, held = report.moved, report.tensors
    number = held.segment_tensors + held.host_tensors + held.nvme_tensors
    total = held.segment_bytes + held.host_bytes + held.nvme_bytes
    places = [
        f"{count(some)} of {size(of_bytes)} {where}"
        for some, of_bytes, where in (
            (held.segment_tensors, held.segment_bytes, "where they were put out"),
            (held.host_tensors, held.host_bytes, "in host"),
            (held.nvme_tensors, held.nvme_bytes, "in nvme alone"),
        )
        if some
    ]
    return [
        "moved since the start: "
        f"loaded {_pages(moved.loaded_pages, moved.loaded_bytes)}; stored {_pages(moved.stored_pages, moved.stored_bytes)}; "
        f"moved together {_pages(moved.relocated_pages, moved.relocated_bytes)}; "
        f"copied for a second writer {_pages(moved.copied_pages, moved.copied_bytes)}; "
        f"{counted(moved.faults, 'fault')}; {counted(moved.open_moves, 'move')} under way",
        f"tensors: {f'{count(number)} of {size(total)}: ' if number else 'none'}{', '.join(places)}",
    ]


def _pages(pages: int, of_bytes: int) -> str:
    return f"{count(pages)} {'page' if pages == 1 else 'pages'}{f' of {size(of_bytes)}' if pages else ''}"


def short(name: str) -> str:
    shown = one_line(name)
    return shown if len(shown) <= MOST_NAME else f"{shown[: MOST_NAME - 1]}…"


def size(number: float) -> str:
    """Bytes in at most eight characters: three digits and a unit; whole ones below a KiB."""
    if number < 1024:
        return f"{number:.0f} B"
    for unit in UNITS:
        number /= 1024
        if number < 999.5 or unit == UNITS[-1]:
            break
    return f"{number:.{0 if number >= 99.95 else 1}f} {unit}"


def count(number: int) -> str:
    """In at most five characters."""
    for unit in ("", "K", "M"):
        if number < (10_000 if unit else 100_000):
            return f"{number}{unit}"
        number //= 1000
    return f"{number}G"
