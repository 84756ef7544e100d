from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys, torch
torch.set_num_threads(1)
from accel_runs import furthest, setup_of, stepped, whole
import dataclasses, accel_impl, accel_impl.port
from accel_impl import device
from harness.cases import image_case, read_model_info
from harness.devices import enabled
from harness.recorder import TraceRecorder
from harness.types import Layout
from pathlib import Path
checkpoint = Path(sys.argv[1])
case = image_case(read_model_info(checkpoint), [(48, 32), (16, 64)])
host = setup_of("float32")
setup = enabled(dataclasses.replace(host, device="pocket:1", options={"device_gib": "1"}))
ports = []
for one in (host, setup):
    ports.append(accel_impl.adapter(checkpoint, one))
    ports[-1].load(checkpoint, one)
expected = whole(ports[0], case)
assert {w.tensor.device.type for w in ports[1].weights()} == {"pocket"}
assert {t.device.type for _, t in ports[1].held()} == {"pocket"}
device.reset_counts()
found = whole(ports[1], case)
assert furthest(found, expected)[0] < 3e-5, furthest(found, expected)
assert furthest(stepped(ports[1], case), found)[0] < 3e-5
counts = device.counts()
assert sum(n for name, n in counts["own"].items() if "mm" in name) > 100, counts
assert counts["fallback"], counts
facts = ports[1].cache_facts()
assert facts["pages_free"] == facts["pages_total"]
for layout in (*accel_impl.port.LAYOUTS[1:], Layout(tp=2, ep=2), Layout(tp=2, pp=2)):
    recorder = TraceRecorder()
    inputs = ports[1].prepare(case, recorder)
    recorder.span(0, inputs.token_ids.shape[1])
    ports[1].simulate(layout, inputs, recorder)
    models = ports[1]._simulated[layout][1]
    assert {t.device.type for m in models for w in m.weights.values() for t in w.parts().values()} == {"pocket"}
    assert furthest(recorder, found)[0] < 3e-5, (layout, furthest(recorder, found))
device.set_cap(1, 1)
try:
    whole(ports[1], case)
except torch.OutOfMemoryError as error:
    print("out of memory:", str(error).splitlines()[0])
else:
    raise AssertionError("expected the card to be full")
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="the small device is built by a C++ compiler")
def test_the_port_runs_on_a_device_that_is_not_the_cpu(checkpoint: Path) -> None:
    """On the small device weights, caches, steps and layouts lie there and say what the CPU says; full is an error."""
    command = [sys.executable, "-c", CODE, str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "out of memory:" in done.stdout
