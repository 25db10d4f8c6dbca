"""text.template and map.python: what they do, and what a stranger's template or function name cannot make them do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hexrt.errors import BadRequest, TaskFailed, Unavailable
from hexrt.ops.registry import load_ops
from tests.bodies import Machine, launch


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def fill(machine: Machine, template: str, values: dict[str, Any] | None = None, **more: Any) -> str:
    text: str = machine.run("text.template", {"template": template, **more}, {"values": values})
    return text


def test_a_prompt_is_made_out_of_search_hits(machine: Machine) -> None:
    template = "{% for hit in hits[0] %}[{{ loop.index }}] {{ hit.text|trim }}\n{% endfor %}Q: {{ question }}\n"
    values = {"hits": [[{"text": " Everest is 8,849 m. "}, {"text": "K2 is <8,611> m."}]], "question": "How tall?"}
    assert fill(machine, template, values) == "[1] Everest is 8,849 m.\n[2] K2 is <8,611> m.\nQ: How tall?\n"


def test_a_tensor_may_be_named_in_a_template(machine: Machine) -> None:
    assert (
        fill(machine, "{{ '%.1f' % scores[0] }} {{ scores.shape[0] }}", {"scores": np.array([0.5, 2], np.float32)})
        == "0.5 2"
    )


def test_a_value_that_is_missing_is_named(machine: Machine) -> None:
    with pytest.raises(TaskFailed, match=r"s.params.template: UndefinedError: 'question' is undefined"):
        fill(machine, "{{ question }}")
    with pytest.raises(TaskFailed, match=r"has no attribute 'text'"):
        fill(machine, "{{ hit.text }}", {"hit": {}})


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ 1 + }}", "{% include 'x' %}{% endif %}", "{{ a|nofilter }}", "{%"]
)
def test_a_template_that_cannot_be_read_is_named_with_its_line(machine: Machine, template: str) -> None:
    with pytest.raises(BadRequest, match=r"s.params.template: line 2: "):
        fill(machine, "first\n" + template, {"a": 1})


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}{{ ''|attr('__class__') }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ values.append(1) }}{% set x = values.append %}{{ x(1) }}",
    "{{ mapping.update(a=2) }}",
    "{{ '{0.__class__.__init__}'.format(mapping) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ lipsum.__globals__ }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_reaches_nothing_of_python(machine: Machine, template: str) -> None:
    with pytest.raises((TaskFailed, BadRequest), match=r"s.params.template: "):
        fill(machine, template, {"values": [1], "mapping": {"a": 1}})


BOMBS = [
    "{{ 'x' * 10 ** 10 }}",
    "{{ [0] * 10 ** 10 }}",
    "{{ '%1000000000s' % 'x' }}{{ '%9000000000s' % 'x' }}",
    "{{ 'x'|center(9000000000) }}",
    "{{ '{:>9000000000}'.format('x') }}",
    "{% set a = 'x' * 1000000 %}" + "{% set a = a ~ a %}" * 30 + "{{ a }}",
    "{% set a = 'x' * 100000 %}{{ a|replace('x', a) }}",
    "{% set n = namespace(a='x' * 1000000) %}{% for i in range(40) %}{% set n.a = n.a + n.a %}{% endfor %}{{ n.a }}",
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "{{ range(10 ** 9)|list }}",
]


@pytest.mark.parametrize("template", BOMBS, ids=range(len(BOMBS)))
def test_a_template_that_would_fill_the_memory_is_stopped(machine: Machine, template: str) -> None:
    with pytest.raises((TaskFailed, BadRequest), match=r"s.params.template: "):
        fill(machine, template)
    assert fill(machine, "{{ 'x' * 1000 }}") == "x" * 1000


def test_the_result_may_have_as_many_characters_as_allowed_and_no_more(machine: Machine) -> None:
    assert fill(machine, "{{ 'é' * 9 }}", max_characters=9) == "é" * 9
    with pytest.raises(TaskFailed, match=r"more than 9 characters; raise max_characters"):
        fill(machine, "{{ 'é' * 10 }}", max_characters=9)


# --- map.python ---------------------------------------------------------------------------------------------------

MODULE = """
import os
import subprocess as _subprocess
from os import system
from os.path import join
from json import dumps

def double(value):
    return value * 2

def weigh(value, *, by=1.0, offset=0):
    return value * by + offset

def nothing():
    return {"tensor": None}

def fails(value):
    raise KeyError(value)

def leaves(value):
    return object()

async def later(value):
    return value

def stream(value):
    yield value

def _hidden(value):
    return value

class Tool:
    def __call__(self, value):
        return value

tool = Tool()
borrowed = system
"""


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    package = tmp_path / "site" / "agent_tools_under_test"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def top(value):\n    return ['top', value]\n")
    (package / "maths.py").write_text(MODULE)
    (package / "broken.py").write_text("import no_such_module_anywhere\n")
    info = tmp_path / "site" / "agent_tools-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: agent-tools\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[hexrt.functions]\ntop = agent_tools_under_test:top\nnot_a_function = agent_tools_under_test.maths:Tool\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name in [name for name in sys.modules if name.startswith("agent_tools_under_test")]:
        monkeypatch.delitem(sys.modules, name)
    from hexrt.ops._functions import _find

    _find.cache_clear()
    return Machine(
        tmp_path, {"map.python": {"modules": ["agent_tools_under_test.maths", "agent_tools_under_test.broken"]}}
    )


PREFIX = "agent_tools_under_test.maths:"


def test_a_listed_modules_function_is_called_with_value_and_arguments(offered: Machine) -> None:
    assert offered.run("map.python", {"function": PREFIX + "double"}, {"value": [1, "a"]}) == [1, "a", 1, "a"]
    assert (
        offered.run("map.python", {"function": PREFIX + "weigh"}, {"value": 3, "arguments": {"by": 2.0, "offset": 1}})
        == 7.0
    )
    assert offered.run("map.python", {"function": PREFIX + "nothing"}) == {"tensor": None}
    array = offered.run("map.python", {"function": PREFIX + "double"}, {"value": np.arange(3)})
    assert array.tolist() == [0, 2, 4]


def test_a_registered_function_is_called_by_either_of_its_names(offered: Machine) -> None:
    for name in ("top", "agent_tools_under_test:top"):
        assert offered.run("map.python", {"function": name}, {"value": 1}) == ["top", 1]


def test_nothing_may_be_called_unless_the_config_says_so(machine: Machine) -> None:
    for name in ("os:system", "builtins:eval", "subprocess:run", "json:dumps", "hexrt.values:decode"):
        with pytest.raises(Unavailable, match=r'is not allowed: .*modules in \[ops."map.python"\] of the config'):
            machine.run("map.python", {"function": name}, {"value": "id"})
    with pytest.raises(Unavailable, match=r"no installed package registers a function 'top'"):
        machine.run("map.python", {"function": "top"}, {"value": "id"})


REFUSED = {
    "system": "is defined in posix, which is not allowed",
    "borrowed": "is defined in posix, which is not allowed",
    "join": "is defined in posixpath, which is not allowed",
    "dumps": "is defined in json, which is not allowed",
    "os": "is a module, not a plain function",
    "Tool": "is a type, not a plain function",
    "tool": "is a Tool, not a plain function",
    "later": "is async or a generator",
    "stream": "is async or a generator",
    "missing": "there is no ",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_listed_module_only_borrowed_or_is_no_plain_function_is_refused(offered: Machine, name: str) -> None:
    with pytest.raises((Unavailable, TaskFailed), match=REFUSED[name]):
        offered.run("map.python", {"function": PREFIX + name}, {"value": "true"})


def test_neighbours_parents_and_broken_modules_are_named(offered: Machine) -> None:
    for name in (
        "agent_tools_under_test.other:f",
        "agent_tools_under_test.maths.deep:f",
        "agent_tools_under_test.maths2:f",
    ):
        with pytest.raises(Unavailable, match="is not allowed"):
            offered.run("map.python", {"function": name}, {"value": 1})
    with pytest.raises(Unavailable, match="cannot be loaded: No module named 'no_such_module_anywhere'"):
        offered.run("map.python", {"function": "agent_tools_under_test.broken:f"}, {"value": 1})
    with pytest.raises(Unavailable, match="not_a_function is a type, not a plain function"):
        offered.run("map.python", {"function": "not_a_function"}, {"value": 1})


def test_a_prefix_allows_what_is_below_it_and_an_empty_one_nothing(offered: Machine, tmp_path: Path) -> None:
    below = Machine(tmp_path, {"map.python": {"modules": ["agent_tools_under_test."]}})
    assert below.run("map.python", {"function": PREFIX + "double"}, {"value": 2}) == 4
    with pytest.raises(Unavailable, match="is not allowed"):
        Machine(tmp_path, {"map.python": {"modules": [".", ""]}}).run(
            "map.python", {"function": PREFIX + "double"}, {"value": 2}
        )
    with pytest.raises(Unavailable, match=r'\[ops."map.python"\] is wrong'):
        Machine(tmp_path, {"map.python": {"modules": "os"}}).run("map.python", {"function": "os:getcwd"})


@pytest.mark.parametrize(
    "name",
    [
        "os:__import__",
        "os:path.join",
        "os:_exit",
        "os",
        "os:",
        ":f",
        "__main__:f",
        "os:system\n",
        "os :system",
        "a:b:c",
        "",
        "a" * 400,
    ],
)
def test_a_name_with_a_trick_in_it_is_refused_when_the_workflow_is_checked(machine: Machine, name: str) -> None:
    with pytest.raises((msgspec.ValidationError, Unavailable)):
        machine.run("map.python", {"function": name}, {"value": 1})
    if name != "os":
        with pytest.raises(msgspec.ValidationError, match="function"):
            launch("map.python", {"function": name})


def test_arguments_that_do_not_fit_and_results_that_cannot_be_sent_are_named(offered: Machine) -> None:
    with pytest.raises(
        BadRequest, match=r"s.inputs: .*double does not take these: missing a required argument: 'value'"
    ):
        offered.run("map.python", {"function": PREFIX + "double"})
    with pytest.raises(BadRequest, match=r"unexpected keyword argument 'wrong'"):
        offered.run("map.python", {"function": PREFIX + "weigh"}, {"value": 1, "arguments": {"wrong": 1}})
    with pytest.raises(TaskFailed, match=r"a value of type object cannot be sent"):
        offered.run("map.python", {"function": PREFIX + "leaves"}, {"value": 1})
    with pytest.raises(KeyError, match="boom"):
        offered.run("map.python", {"function": PREFIX + "fails"}, {"value": "boom"})


def test_a_function_is_not_run_twice_unless_the_step_says_that_it_may(machine: Machine) -> None:
    spec = load_ops()[0]["map.python"]
    assert spec.is_idempotent(msgspec.convert({"function": "a:b"}, spec.params)) is False
