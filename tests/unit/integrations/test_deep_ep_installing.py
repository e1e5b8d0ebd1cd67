"""How programs come to the DeepEP face: a call, or a folder for PYTHONPATH; and that nothing happens without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="DeepEP's tensors are torch's")

import asyncfabric.integrations.deep_ep as face

ROOT = Path(__file__).parents[3]
CALLERS = """
import deep_ep, torch
from deep_ep import Buffer, Config, ElasticBuffer, EPHandle, EventHandle as Handle, EventOverlap
from deep_ep.utils import EventHandle, EventOverlap as Same
from deep_ep.buffer import Buffer as TheSame
assert Buffer is TheSame and Same is EventOverlap and deep_ep.topk_idx_t == torch.int64
assert Buffer.__module__ == "asyncfabric.integrations.deep_ep.buffer"
EventOverlap(EventHandle()).current_stream_wait()
with Buffer.capture() as event:
    assert event.event.event is None
config = Buffer.get_dispatch_config(16)
assert config.get_nvl_buffer_size_hint(7168 * 2, 8) > 0 == Config(20).get_rdma_buffer_size_hint(7168 * 2, 8)
assert Config(20, 6, 256, 6, 128).get_rdma_buffer_size_hint(7168 * 2, 16) > 0
assert ElasticBuffer.__module__ == "asyncfabric.integrations.deep_ep.elastic" and Handle is EventHandle
assert "topk_idx" in EPHandle.__annotations__ and isinstance(ElasticBuffer.capture(), EventHandle)
calls, event = [], EventOverlap(ElasticBuffer.capture())
event.register_hook_after_wait(lambda: calls.append(1))
with event:
    assert not calls
event.current_stream_wait()
assert calls == [1] and event.event is not None
with event(release_handle=True):
    assert event.event is not None
assert event.event is None
"""


def run(code: str, **environment: str) -> None:
    """Run a program in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-P", "-c", code], env=kept | environment, check=True, timeout=120)


@pytest.mark.slow
def test_a_folder_on_pythonpath_is_enough(tmp_path: Path) -> None:
    (tmp_path / "deep_ep.py").write_text("raise RuntimeError('the foreign one')")
    run(CALLERS, PYTHONPATH=f"{face.pythonpath()}{os.pathsep}{tmp_path}")


@pytest.mark.slow
def test_a_call_installs_and_takes_away(tmp_path: Path) -> None:
    foreign = tmp_path / "deep_ep"
    foreign.mkdir()
    (foreign / "__init__.py").write_text("mine = True")
    (foreign / "utils.py").write_text("mine = True")
    code = f"""
import importlib.util, deep_ep.utils
assert deep_ep.mine
import asyncfabric.integrations.deep_ep as face
face.install(); face.install()
{CALLERS}
assert importlib.util.find_spec("deep_ep").origin.startswith(face.pythonpath())
face.uninstall(); face.uninstall()
import deep_ep.utils
assert deep_ep.mine and deep_ep.utils.mine
"""
    run(code, PYTHONPATH=str(tmp_path))


def test_no_top_level_deep_ep_is_packaged() -> None:
    assert not (ROOT / "deep_ep").exists()
    assert '"asyncfabric.integrations.deep_ep": ["pythonpath/deep_ep/*.py"]' in (ROOT / "setup.py").read_text()
    folder = Path(face.pythonpath())
    assert not (folder / "__init__.py").exists()  # no package, so that none of its modules is found by two names
    assert {path.name for path in (folder / "deep_ep").glob("*.py")} == {"__init__.py", "buffer.py"}
