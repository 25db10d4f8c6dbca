"""Reads an op's own table of the config, `[ops.NAME]`, into a typed record.

Used by step bodies. Owns nothing.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from hexrt.errors import Unavailable
from hexrt.ops.spec import StepContext

S = TypeVar("S", bound=msgspec.Struct)


def read_settings(context: StepContext, op: str, kind: type[S]) -> S:
    """Raises Unavailable, naming the table and the key, where the config holds what `kind` does not take."""
    try:
        return msgspec.convert(context.settings, kind)
    except msgspec.ValidationError as error:
        raise Unavailable(
            f'the config\'s [ops."{op}"] is wrong, ask whoever runs hexrtd: {error}', context.step
        ) from None
