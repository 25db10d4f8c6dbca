"""Commands about the configuration: `config check` and `config show`."""

from __future__ import annotations

import os
from pathlib import Path

import click
import msgspec

from hexrt.cli.output import print_json, print_text
from hexrt.cli.settings import each_value, load_settings


@click.group()
def config() -> None:
    """Check and show the daemon's configuration."""


@config.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(file: Path, as_json: bool) -> int:
    """Check the TOML FILE alone, without flags and environment."""
    settings = load_settings({}, {}, file)
    if as_json:
        print_json({"file": str(file), "set": sorted(settings.origins)})
    else:
        print(f"{file}: {len(settings.origins)} values set: good")
    return 0


@config.command()
@click.option("--config", "file", type=click.Path(path_type=Path), help="The file that hexrtd would be given.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(file: Path | None, as_json: bool) -> int:
    """Show each value and where it came from, as hexrtd would take it with this environment."""
    settings = load_settings({}, os.environ, file)
    values = dict(each_value(settings.config))
    if as_json:
        print_json({key: {"value": value, "origin": settings.origin(key)} for key, value in values.items()})
        return 0
    width = max(len(key) for key in values)
    for key, value in values.items():
        print_text(f"{key:{width}} = {msgspec.json.encode(value).decode():<12} # {settings.origin(key)}")
    return 0
