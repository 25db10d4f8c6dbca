"""Ops of other packages: found by their entry points, refused by name, and not looked for at length where there are none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hexrt.ops.registry import load_ops

MODULE = """
from hexrt.ops.spec import OpSpec, Part
GOOD = OpSpec("greet", "Greets.", (Part("greet", (), "offered_ops_under_test:body"),))
TAKEN = OpSpec("noop", "Another noop.", ())
"""
ENTRY_POINTS = """[console_scripts]
tool = offered_ops_under_test:main

[hexrt.ops]
good = offered_ops_under_test:GOOD
taken = offered_ops_under_test:TAKEN
absent = offered_ops_under_test:ABSENT
strange = offered_ops_under_test:MODULE_NAME
gone = no_such_module_anywhere:OP
"""


def test_ops_of_other_packages_are_loaded_and_bad_ones_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "offered_ops_under_test.py").write_text(MODULE + "MODULE_NAME = __name__\n")
    info = tmp_path / "offered_ops-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offered-ops\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    ops, refused = load_ops()
    monkeypatch.delitem(sys.modules, "offered_ops_under_test")
    assert ops["greet"].doc == "Greets." and ops["noop"].doc != "Another noop."
    assert set(refused) == {"taken", "absent", "strange", "gone"}
    assert refused["taken"] == "op 'noop' exists already" and refused["strange"] == "is a str, not an OpSpec"
    assert "no_such_module_anywhere" in refused["gone"]


def test_where_no_package_offers_an_op_the_machinery_of_entry_points_is_not_loaded() -> None:
    program = "import sys, hexrt.daemon; from hexrt.ops.registry import load_ops; load_ops(); print('importlib.metadata' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
