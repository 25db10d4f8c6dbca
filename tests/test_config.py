"""The configuration: which source wins, and what a bad value is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from hexrt.cli.settings import each_value, live_changes, load_config, load_settings
from hexrt.config import Config
from hexrt.errors import BadRequest

NOWHERE = {"XDG_CONFIG_HOME": "/nonexistent"}


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "hexrt.toml"
    file.write_text(text)
    return file


def refused(tmp_path: Path, text: str = "", flags: dict | None = None, environ: dict | None = None) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        load_config(flags or {}, environ or {}, written(tmp_path, text))
    assert "\n" not in str(caught.value)
    return caught.value


def test_without_any_source_every_value_is_the_default() -> None:
    settings = load_settings({"daemon.socket": None}, NOWHERE, None)
    assert settings.config == Config()
    assert {settings.origin(key) for key, _ in each_value(settings.config)} == {"default"}


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(tmp_path: Path) -> None:
    file = written(tmp_path, '[daemon]\nsocket = "f"\nstate_dir = "f"\nmodels_dir = "f"\n')
    environ = {"HEXRT_DAEMON_SOCKET": "e", "HEXRT_STATE_DIR": "e", "HEXRT_POOL_WORKERS": "3"}
    settings = load_settings({"daemon.socket": "flag"}, environ, file)
    daemon = settings.config.daemon
    assert (daemon.socket, daemon.state_dir, daemon.models_dir, settings.config.pool.workers) == ("flag", "e", "f", 3)
    assert [settings.origin(f"daemon.{key}") for key in ("socket", "state_dir", "models_dir", "drain_s")] == [
        "flag", "environment HEXRT_STATE_DIR", f"file {file}", "default",
    ]  # fmt: skip


def test_the_long_name_of_a_variable_beats_its_short_form() -> None:
    environ = {"HEXRT_SOCKET": "short", "HEXRT_DAEMON_SOCKET": "long", **NOWHERE}
    assert load_config({}, environ, None).daemon.socket == "long"


def test_texts_of_the_environment_become_numbers_lists_and_truths() -> None:
    environ = {"HEXRT_DAEMON_ADMIN_GIDS": "4, 27", "HEXRT_CPU_ENABLED": "no", "HEXRT_DAEMON_DRAIN_S": "2.5", **NOWHERE}
    config = load_config({}, environ, None)
    assert (config.daemon.admin_gids, config.cpu.enabled, config.daemon.drain_s) == ((4, 27), False, 2.5)


def test_tables_of_models_and_ops_come_from_the_file(tmp_path: Path) -> None:
    text = '[models.smol]\npath = "smollm2"\n[ops."tool.http"]\nhosts = ["a.example"]\n'
    settings = load_settings({}, {}, written(tmp_path, text))
    assert settings.config.models["smol"].path == "smollm2"
    text = '[models.far]\nendpoint = "https://[::1]:8000/v1"\nendpoint_model = "big"\nconcurrency = 3\n'
    far = load_settings({}, {}, written(tmp_path, text)).config.models["far"]
    assert (far.endpoint, far.concurrency, far.tries) == ("https://[::1]:8000/v1", 3, 4)
    assert settings.config.ops == {"tool.http": {"hosts": ["a.example"]}}
    assert settings.origin("ops.tool.http").startswith("file")


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ("[limits]\nmax_step = 1", "limits.max_step", "did you mean 'max_steps'?"),
        ("[limit]\nmax_steps = 1", "limit", "did you mean 'limits'?"),
        ("pool = 3", "pool", "must be a table, [pool]"),
        ("[limits]\nmax_steps = 0", "limits.max_steps", "from 1 to 2147483648"),
        ("[limits]\nmax_steps = -1", "limits.max_steps", "-1"),
        ("[limits]\nmax_steps = 99999999999999999999", "limits.max_steps", "from 1"),
        ('[limits]\nmax_steps = "many"', "limits.max_steps", "must be a whole number"),
        ("[limits]\nmax_steps = true", "limits.max_steps", "must be a whole number"),
        ("[daemon]\ndrain_s = nan", "daemon.drain_s", "finite"),
        ("[daemon]\ndrain_s = inf", "daemon.drain_s", "finite"),
        ("[daemon]\ndrain_s = 0", "daemon.drain_s", "above 0 and at most 31536000"),
        ('[daemon]\nlog_level = "loud"', "daemon.log_level", "debug"),
        ('[daemon]\nadmin_gids = ["x"]', "daemon.admin_gids", "a list, each entry a whole number"),
        ("[ops.a]\nx = [nan]", "ops.a.x.0", "finite"),
        ("[models.a]\ndtype = 'float32'", "models.a.path", "a model needs a path"),
        ('[models.a]\npath = "x"\nendpoint = "http://h/v1"', "models.a.endpoint", "not both"),
        ('[models.a]\npath = "x"\ntries = 4', "models.a.tries", "does not go with a path"),
        ('[models.a]\nendpoint = "http://h/v1"\nweights = "as_dtype"', "models.a.weights", "does not go with an endpoint"),
        ('[models.a]\nendpoint = "http://h/v1"\nconcurrency = 0', "models.a", ">= 1"),
        ('[models.a]\nendpoint = "ftp://h/v1"', "models.a.endpoint", "must be an http or https URL"),
        ('[models.a]\nendpoint = "127.0.0.1:8000"', "models.a.endpoint", "must be an http or https URL"),
        ('[models.a]\nendpoint = "http:///v1"', "models.a.endpoint", "must be an http or https URL"),
        ('[models.a]\nendpoint = "http://h:99999"', "models.a.endpoint", "must be an http or https URL"),
        ('[models.a]\nendpoint = "http://h/v1\\n"', "models.a.endpoint", "must be an http or https URL"),
        ('[models.a]\nendpoint = "http://u:p@h/v1"', "models.a.endpoint", "api_key_file"),
        ('[models.a]\nendpoint = "http://h/v1?x=1"', "models.a.endpoint", "without query"),
        ('[models.a]\npath = "x"\ndtype = "bfloat16"\nkv_dtype = "float32"', "models.a.kv_dtype", "hold no more"),
        ('[models.a]\npath = "x"\nweights = "int3"', "models.a", "int3"),
        ("[models]\na = 3", "models.a", "object"),
    ],
)  # fmt: skip
def test_a_bad_value_in_a_file_is_refused_by_key_source_and_range(
    tmp_path: Path, text: str, where: str, says: str
) -> None:
    error = refused(tmp_path, text)
    assert error.where == where and says in error.message and "hexrt.toml" in error.message


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("HEXRT_LIMITS_MAX_STEPS", "nan", "from 1"),
        ("HEXRT_DAEMON_DRAIN_S", "nan", "finite"),
        ("HEXRT_DAEMON_SOKET", "x", "did you mean 'socket'?"),
        ("HEXRT_MODELS_DIR", "x", "configuration file"),
        ("HEXRT_CPU_ENABLED", "perhaps", "true or false"),
    ],
)
def test_a_bad_value_in_the_environment_names_the_variable(
    tmp_path: Path, variable: str, value: str, says: str
) -> None:
    error = refused(tmp_path, environ={variable: value})
    assert variable in str(error) and says in error.message


def test_foreign_variables_are_left_alone() -> None:
    assert load_config({}, {"HEXRT_TESTS_ONLY": "1", "PATH": "/bin", **NOWHERE}, None) == Config()


@pytest.mark.parametrize("content", [b"[a\n", b"\xff\xfe", b"a = " + b"[" * 5000 + b"]" * 5000])
def test_a_file_that_is_no_toml_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(BadRequest, match=r"bad\.toml"):
        load_config({}, {}, file)


def test_a_named_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="No such file"):
        load_config({}, {}, tmp_path / "none.toml")


def test_the_users_file_is_found_when_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "hexrt").mkdir()
    (tmp_path / "hexrt" / "hexrt.toml").write_text("[pool]\nworkers = 9\n")
    assert load_config({}, {"XDG_CONFIG_HOME": str(tmp_path)}, None).pool.workers == 9


def test_live_changes_are_taken_over_and_the_others_named(tmp_path: Path) -> None:
    text = '[ops.noop]\nx = 1\n[limits]\nmax_steps = 5\nmax_output_mib = 5\n[daemon]\nlog_level = "debug"\nsocket = "x"\n[pool]\nworkers = 2\n[models.m]\npath = "p"\n'
    merged, restart = live_changes(Config(), load_config({}, {}, written(tmp_path, text)))
    assert (merged.limits.max_steps, merged.daemon.log_level) == (5, "debug")
    assert (merged.daemon.socket, merged.pool.workers, merged.models) == ("", 0, {})
    assert (merged.ops, merged.limits.max_output_mib) == ({}, Config().limits.max_output_mib), "hosts have the old ones"
    assert restart == ["daemon.socket", "limits.max_output_mib", "pool.workers", "models.m", "ops.noop"]
    assert live_changes(merged, merged) == (merged, [])
