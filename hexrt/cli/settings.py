"""Loads the configuration: flag over environment over file over default, each value with where it came from.

Owns the merging and the messages about bad values; the fields themselves are in `hexrt.config`. A value is named by its dotted key
(`limits.max_steps`). In the environment that is HEXRT_LIMITS_MAX_STEPS; HEXRT_SOCKET and HEXRT_STATE_DIR are short forms.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec
from msgspec import inspect

from hexrt import paths
from hexrt.config import LIVE, Config, Model
from hexrt.errors import BadRequest
from hexrt.workflow.fields import did_you_mean, quoted

DEFAULT = "default"
SHORT = {"HEXRT_SOCKET": "daemon.socket", "HEXRT_STATE_DIR": "daemon.state_dir"}
FREE_TABLES = frozenset({"models", "ops"})
"""Sections whose keys are names of the user's choice; only a file can fill them."""
OF_PATH = ("dtype", "weights", "kv_dtype")
OF_ENDPOINT = ("endpoint_model", "api_key_file", "concurrency", "connect_s", "idle_s", "tries")
"""What [models.NAME] may say beside `path`, and what beside `endpoint`."""


class Settings(msgspec.Struct, frozen=True):
    config: Config
    origins: Mapping[str, str]

    def origin(self, key: str) -> str:
        """Where the value of a dotted key came from: `flag`, `environment NAME`, `file NAME` or `default`."""
        return self.origins.get(key, DEFAULT)


def load_config(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None) -> Config:
    """The configuration. `flags` are by dotted key, None for one that was not given. Raises BadRequest naming key, source and range."""
    return load_settings(flags, environ, file).config


def load_settings(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None) -> Settings:
    """`load_config` with the origins. Without `file`, HEXRT_CONFIG, the user's and the system's file are looked for."""
    fields = _fields()
    found: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    for key, value, origin in _sources(flags, environ, file or paths.config_file(environ), fields):
        section, _, name = key.partition(".")
        if section in FREE_TABLES:
            _check_finite(value, key, origin)
            is_model = section == "models"
            converted = _convert(fields[section].value_type.cls if is_model else dict[str, Any], value, key, origin)
            if is_model:
                _check_model(converted, value, key, origin)
            found.setdefault(section, {})[name] = converted
        else:
            found.setdefault(section, {})[name] = _convert_field(fields[section], name, value, key, origin)
        origins[key] = origin
    return Settings(msgspec.convert(found, Config), origins)


def _fields() -> dict[str, Any]:
    """msgspec's description of each section."""
    described = inspect.type_info(Config)
    assert isinstance(described, inspect.StructType)
    return {field.name: field.type for field in described.fields}


def _sources(
    flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None, fields: Mapping[str, Any]
) -> Iterator[tuple[str, Any, str]]:
    """(key, value, origin), the weakest source first. Every key exists."""
    if file is not None:
        yield from _from_file(file, fields)
    yield from _from_environment(environ, fields)
    for key, value in flags.items():
        if value is not None:
            section, _, name = key.partition(".")
            _check_key(section, name, "flag", fields)
            yield key, value, "flag"


def _from_file(file: Path, fields: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    origin = f"file {file}"
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadRequest(f"cannot be read: {error.strerror}", str(file)) from None
    except UnicodeDecodeError:
        raise BadRequest("is not UTF-8 text", str(file)) from None
    except tomllib.TOMLDecodeError as error:
        raise BadRequest(f"is no valid TOML: {error}", str(file)) from None
    except RecursionError:
        raise BadRequest("is nested too deeply", str(file)) from None
    for section, table in tables.items():
        _check_key(section, None, origin, fields)
        if not isinstance(table, dict):
            raise BadRequest(f"{quoted(table)} ({origin}): must be a table, [{section}]", section)
        for name, value in table.items():
            _check_key(section, name, origin, fields)
            yield f"{section}.{name}", value, origin


def _from_environment(environ: Mapping[str, str], fields: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """The short forms first, so that the long ones win."""
    for variable, key in SHORT.items():
        if environ.get(variable):
            yield key, environ[variable], f"environment {variable}"
    for variable in sorted(environ):
        prefix, _, rest = variable.partition("_")
        section, _, name = rest.lower().partition("_")
        if prefix != "HEXRT" or variable in SHORT or section not in fields:
            continue
        if section in FREE_TABLES:
            raise BadRequest(f"[{section}] can only be set in a configuration file", variable)
        _check_key(section, name, f"environment {variable}", fields)
        yield f"{section}.{name}", environ[variable], f"environment {variable}"


def _check_key(section: str, name: str | None, origin: str, fields: Mapping[str, Any]) -> None:
    if section not in fields:
        raise BadRequest(
            f"there is no section {quoted(section)} ({origin}){did_you_mean(section, list(fields))}", section
        )
    if name is None or section in FREE_TABLES:
        return
    known = [field.name for field in fields[section].fields]
    if name not in known:
        raise BadRequest(f"there is no such key ({origin}){did_you_mean(name, known)}", f"{section}.{name}")


def _convert_field(section: inspect.StructType, name: str, value: Any, key: str, origin: str) -> Any:
    field = next(field for field in section.fields if field.name == name)
    if isinstance(value, str) and not origin.startswith("file"):
        value = _from_text(field.type, value)
    _check_finite(value, key, origin)
    if isinstance(value, bool) and not isinstance(field.type, inspect.BoolType):
        raise BadRequest(f"{value} ({origin}): must be {_range(field.type)}", key)
    try:
        whole = msgspec.convert({name: value}, section.cls)
    except msgspec.ValidationError:
        raise BadRequest(f"{quoted(value)} ({origin}): must be {_range(field.type)}", key) from None
    return getattr(whole, name)


def _from_text(kind: inspect.Type, text: str) -> Any:
    """The value that a text of the environment or a flag stands for; the text itself where it stands for none."""
    if isinstance(kind, inspect.BoolType):
        return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.lower(), text)
    if isinstance(kind, inspect.VarTupleType):
        return [_from_text(kind.item_type, part.strip()) for part in text.split(",") if part.strip()]
    for described, make in ((inspect.IntType, int), (inspect.FloatType, float)):
        if isinstance(kind, described):
            try:
                return make(text)
            except ValueError:
                return text
    return text


def _check_finite(value: Any, key: str, origin: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRequest(f"{value} ({origin}): must be a finite number", key)
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        _check_finite(part, f"{key}.{name}", origin)


def _convert(kind: Any, value: Any, key: str, origin: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{error} ({origin})".replace("$.", f"{key}."), key) from None


def _check_model(model: Model, given: Iterable[str], key: str, origin: str) -> None:
    """Raises BadRequest where a model is not of exactly one kind, or a field is of the other kind."""

    def refuse(field: str, why: str) -> BadRequest:
        return BadRequest(f"{why} ({origin})", f"{key}.{field}")

    if model.path and model.endpoint:
        raise refuse("endpoint", "a model has a path or an endpoint, not both")
    if not model.path and not model.endpoint:
        raise refuse("path", "a model needs a path (a folder or a .gguf file), or an endpoint")
    kind, others = ("endpoint", OF_PATH) if model.endpoint else ("path", OF_ENDPOINT)
    for field in others:
        if field in given:
            raise refuse(field, f"does not go with {'an endpoint' if kind == 'endpoint' else 'a path'}")
    if model.endpoint and (why := _fault_of_url(model.endpoint)):
        raise refuse("endpoint", f"{quoted(model.endpoint)}: {why}, such as http://127.0.0.1:8000/v1")
    if model.kv_dtype == "float32" != model.dtype:
        raise refuse("kv_dtype", f"float32 pages hold no more of a model that computes in {model.dtype}")


def _fault_of_url(text: str) -> str:
    """Why it is no address of an HTTP server; empty where it is one."""
    try:
        url: SplitResult = urlsplit(text)
        _ = url.port  # raises where it is no number, or too great
    except ValueError:
        return "must be an http or https URL"
    if url.scheme not in ("http", "https") or not url.hostname or any(c.isspace() for c in text):
        return "must be an http or https URL"
    if url.username is not None or url.password is not None:
        return "must not hold a name or password (a key stands in api_key_file)"
    return "must be a URL without query and fragment" if url.query or url.fragment else ""


def _range(kind: inspect.Type) -> str:
    """What may stand there, for people."""
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
        if kind.gt is not None:
            noun += f" above {kind.gt}"
        if kind.ge is not None:
            noun += f" from {kind.ge}"
        return noun + (f"{' to' if kind.ge is not None else ' and at most'} {kind.le}" if kind.le is not None else "")
    if isinstance(kind, inspect.LiteralType):
        return "one of " + ", ".join(map(str, kind.values))
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.VarTupleType):
        return f"a list, each entry {_range(kind.item_type)}"
    return "a text"


def each_value(config: Config) -> Iterator[tuple[str, Any]]:
    """Every dotted key with its value, in the order of `hexrt.config`."""
    for section, table in msgspec.to_builtins(config).items():
        for name, value in table.items():
            yield f"{section}.{name}", value


def live_changes(old: Config, new: Config) -> tuple[Config, list[str]]:
    """`old` with those changes of `new` that a running daemon can take over, and the keys of those that need a restart."""
    sections: dict[str, Any] = {}
    restart = []
    for section in Config.__struct_fields__:
        before, after = getattr(old, section), getattr(new, section)
        if section in LIVE or before == after:
            sections[section] = after
        elif isinstance(before, dict):
            sections[section] = before
            restart += [f"{section}.{name}" for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]  # fmt: skip
        else:
            changed = [name for name in before.__struct_fields__ if getattr(before, name) != getattr(after, name)]
            live = {name: getattr(after, name) for name in changed if f"{section}.{name}" in LIVE}
            sections[section] = msgspec.structs.replace(before, **live)
            restart += [f"{section}.{name}" for name in changed if name not in live]
    return Config(**sections), restart


def socket_path(config: Config) -> Path:
    """Where the daemon of this configuration listens."""
    return Path(config.daemon.socket).expanduser() if config.daemon.socket else paths.daemon_socket(os.environ)


def state_dir(config: Config) -> Path:
    """Where the daemon of this configuration keeps its state."""
    return Path(config.daemon.state_dir).expanduser() if config.daemon.state_dir else paths.state_dir(os.environ)
