"""A device whose host cannot start: `hexrt devices` says why, and what needs it is refused by that reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hexrt.client import Client
from hexrt.errors import Unavailable
from hexrt.workflow.model import Needs, StepSpec, Workflow
from tests.notation import workflow
from tests.running import CONFIG, Running

NPU = '[npu]\nenabled = true\nprovider = "VitisAIExecutionProvider"\n'
TEXT = {"texts": ["a"]}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    pytest.importorskip("onnxruntime")
    config = CONFIG.replace("[npu]\nenabled = false\n", NPU)
    with Running(tmp_path_factory.mktemp("lost"), config) as running, running.client() as connected:
        yield connected


def needs_npu() -> Workflow:
    return Workflow((StepSpec("e", "embed.text", {}, TEXT, needs=Needs("npu")), StepSpec("other", "noop")))


def test_a_host_that_cannot_start_is_told_by_name_and_what_needs_it_fails_or_is_refused(client: Client) -> None:
    early = client.run(needs_npu())  # submitted while the device is still said to start
    assert early.errors["e"].kind == "unavailable" and "VitisAIExecutionProvider" in early.errors["e"].message
    assert "other" in early.outputs
    (npu,) = [device for device in client.devices() if device.kind == "npu"]
    assert npu.state == "lost"
    assert "could not be started 3 times" in npu.why and "npu.provider" in npu.why
    assert "'VitisAIExecutionProvider', which is not installed here" in npu.why
    with pytest.raises(Unavailable) as refused:
        client.submit(needs_npu())
    assert refused.value.where == "steps.e" and "which is not installed here" in refused.value.message
    client.run(workflow("a -> b")).check()
