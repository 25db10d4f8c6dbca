"""Commands about the configuration: `config check` and `config show`."""

from __future__ import annotations

import os
from pathlib import Path

import click
import msgspec

from hexrt.cli.output import print_json, print_text
from hexrt.cli.settings import each_value, load_settings, socket_path, state_dir
from hexrt.config import Config
from hexrt.errors import BadRequest


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


@config.command(short_help="Show each value and where it came from.")
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
        empty = "" if value else _meaning_of_empty(key, settings.config)
        print_text(f"{key:{width}} = {msgspec.json.encode(value).decode():<12} # {settings.origin(key)}{empty}")
    return 0


def _meaning_of_empty(key: str, config: Config) -> str:
    """The path that hexrtd takes where the configuration leaves it to this machine."""
    try:
        if key == "daemon.socket":
            return f": {socket_path(config)}"
        if key == "daemon.state_dir":
            return f": {state_dir(config)}"
        if key == "daemon.models_dir":
            return f": {state_dir(config) / 'models'}"
    except BadRequest as error:
        return f": {error.message}"
    return ""
