"""The work of `text.template`: Jinja's immutable sandbox under a cap of characters and of memory.

Templates come from strangers. The sandbox keeps them from Python's insides; what it lets them compute (`'x' * 10 ** 10`, texts doubled
by filters) is bounded by an address-space limit that holds while a template is filled, and by the step's timeout.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hexrt.bounds import EXTRA_BYTES, memory_limit
from hexrt.errors import BadRequest, TaskFailed


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True, cache_size=0
    )


@lru_cache(maxsize=64)
def _compile(source: str) -> Template:
    return _environment().from_string(source)


def render(step: str, source: str, values: dict[str, Any], max_characters: int) -> str:
    """Raises BadRequest where the template cannot be read, TaskFailed where it cannot be filled or grows too large."""
    where = f"{step}.params.template"
    parts: list[str] = []
    size = 0
    try:
        with memory_limit():
            for part in _compile(source).generate(values):
                size += len(part)
                if size > max_characters:
                    raise TaskFailed(f"the text has more than {max_characters} characters; raise max_characters", where)
                parts.append(part)
            return "".join(parts)
    except TemplateSyntaxError as error:
        raise BadRequest(f"line {error.lineno}: {error.message}", where) from None
    except TemplateError as error:
        raise TaskFailed(f"{type(error).__name__}: {error.message}", where) from None
    except MemoryError:
        raise TaskFailed(f"filling it takes more than {EXTRA_BYTES >> 20} MiB", where) from None
    except RecursionError:
        raise TaskFailed("it is nested too deeply", where) from None
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise TaskFailed(f"{type(error).__name__}: {error}", where) from None
