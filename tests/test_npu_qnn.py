"""The NPU host on Qualcomm's provider: a Hexagon NPU where there is one, else its software model. Slow, and optional."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hexrt.protocol.host import HostFailed, HostFinished
from hexrt.values import decode
from tests.bodies import IMAGES, Machine, launch, need_models
from tests.npu_host import NpuHost

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_qnn") is None,
    reason="onnxruntime-qnn is not installed: pip install 'hexrt[npu]' (Python 3.11 on x86-64; 100 MB, proprietary licence)",
)
QNN = "QNNExecutionProvider"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NpuHost]:
    need_models("minilm", "efficientnet-lite0")
    with NpuHost(tmp_path_factory.mktemp("state"), provider=QNN) as made:
        yield made


def test_the_facts_say_which_provider_and_that_it_is_software(host: NpuHost) -> None:
    facts = host.ready.facts
    assert facts["provider"] == QNN and facts["package"].startswith("onnxruntime-qnn ")
    assert facts["npu"] or "software model" in facts["why"]


def test_texts_are_embedded_on_it_as_on_the_cpu(host: NpuHost, tmp_path: Path) -> None:
    texts = [
        "A cat sleeps on the sofa.",
        "a somewhat longer text about volcanoes and their eruptions over the last thousand years",
    ]
    host.send(launch("embed.text", {}, {"texts": texts}))
    report = host.next()
    assert isinstance(report, HostFinished), report
    expected = Machine(tmp_path).run("embed.text", {}, {"texts": texts})
    assert ((decode(report.output) * expected).sum(axis=1) > 0.999).all()


def test_a_picture_is_labelled_on_it_as_on_the_cpu(host: NpuHost, tmp_path: Path) -> None:
    picture = (IMAGES / "coffee.jpg").read_bytes()
    host.send(launch("image.encode", {}, {"image": picture}, command=2))
    report = host.next()
    assert isinstance(report, HostFinished), report
    expected = Machine(tmp_path).run("image.encode", {}, {"image": picture})
    seen = decode(report.output)
    assert seen["label"] == expected["label"]
    near = (
        seen["embedding"]
        @ expected["embedding"]
        / np.linalg.norm(seen["embedding"])
        / np.linalg.norm(expected["embedding"])
    )
    assert near > 0.999


def test_what_the_npu_cannot_run_is_refused_and_never_moved_to_the_cpu(host: NpuHost, tmp_path: Path) -> None:
    """A model with an operator that the NPU has not."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install 'hexrt[demo]'")
    from hexrt.devices.npu_provider import choose_provider
    from hexrt.devices.onnx import Execution, open_session
    from hexrt.errors import Unavailable

    text = onnx.TensorProto.STRING
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("StringNormalizer", ["a"], ["b"])],
        "strings",
        [onnx.helper.make_tensor_value_info("a", text, [1])],
        [onnx.helper.make_tensor_value_info("b", text, [1])],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "model.onnx")
    target, _ = choose_provider({"provider": QNN})
    with Execution(target), pytest.raises(Unavailable, match=rf"cannot be opened on {QNN}"):
        open_session(tmp_path / "model.onnx")


def test_an_error_on_it_fails_one_launch_only(host: NpuHost) -> None:
    host.send(launch("embed.text", {}, {"texts": []}, command=3), launch("noop", {}, {"value": 1}, command=4))
    first, second = host.next(), host.next()
    assert isinstance(first, HostFailed) and first.error.kind == "bad_request"
    assert isinstance(second, HostFinished)
