"""How programs come to the NIXL face: a call, a folder for PYTHONPATH, plugins; and that nothing happens without."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import asyncfabric.integrations.nixl as face
from asyncfabric import FabricConfig
from asyncfabric.integrations.nixl import settings

ROOT = Path(__file__).parents[3]
CALLERS = """
from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t, nixl_prepped_dlist_handle, nixl_xfer_handle
from nixl._api import nixlBind
from nixl._bindings import nixlXferTelemetry, nixlRemoteDisconnectError, nixlRegDList
import nixl
assert nixl.nixl_agent is nixl_agent and nixlBind.nixlRegDList is nixlRegDList
assert nixl_agent.__module__ == "asyncfabric.integrations.nixl.agent"
"""
FOREIGN = "raise RuntimeError('the foreign one')"


def run(code: str, **environment: str) -> None:
    """Run a program in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "ASYNCFABRIC_NIXL")}
    subprocess.run([sys.executable, "-P", "-c", code], env=kept | environment, check=True, timeout=120)


def test_a_folder_on_pythonpath_is_enough(tmp_path: Path) -> None:
    foreign = tmp_path / "nixl"
    foreign.mkdir()
    (foreign / "__init__.py").write_text(FOREIGN)
    run(CALLERS, PYTHONPATH=f"{face.pythonpath()}{os.pathsep}{tmp_path}")


@pytest.mark.slow
def test_a_call_installs_and_takes_away(tmp_path: Path) -> None:
    foreign = tmp_path / "nixl"
    foreign.mkdir()
    (foreign / "__init__.py").write_text("mine = True")
    (foreign / "_api.py").write_text("mine = True")
    code = f"""
import importlib.util, nixl._api
assert nixl.mine
import asyncfabric.integrations.nixl as face
face.install(); face.install()
{CALLERS}
assert importlib.util.find_spec("nixl").origin.startswith(face.pythonpath())
face.uninstall(); face.uninstall()
import nixl._api
assert nixl.mine and nixl._api.mine
"""
    run(code, PYTHONPATH=str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("group", ["vllm.general_plugins", "sglang.srt.plugins"])
def test_plugins_do_nothing_unless_the_environment_asks(group: str) -> None:
    named = [entry for entry in entry_points(group=group) if entry.name == "asyncfabric_nixl"]
    if not named:
        pytest.skip("THE ENTRY POINTS WERE NOT CHECKED: this build was installed without them; run `make build`")
    load = f"from {named[0].module} import {named[0].attr} as plugin\nplugin()\n"
    run(f"import sys\nbefore = list(sys.path)\n{load}assert sys.path == before and 'nixl' not in sys.modules")
    run(load + CALLERS, ASYNCFABRIC_NIXL="1")


def test_no_top_level_nixl_is_packaged() -> None:
    assert not (ROOT / "nixl").exists()
    text = (ROOT / "setup.py").read_text()
    assert '"asyncfabric.integrations.nixl": ["pythonpath/nixl/*.py"]' in text
    folder = Path(face.pythonpath())
    assert not (folder / "__init__.py").exists()  # no package, so that none of its modules is found by two names
    assert {path.name for path in (folder / "nixl").glob("*.py")} == {"__init__.py", "_api.py", "_bindings.py"}


def test_the_environment_chooses_rails() -> None:
    assert settings.fabric_config(None, {}) == FabricConfig()
    chosen = settings.fabric_config(
        None, {"ASYNCFABRIC_NIXL_RAILS": "local, tcp:lo", "ASYNCFABRIC_NIXL_POLLING": "busy"}
    )
    assert chosen.rails == ("local", "tcp:lo") and chosen.polling == "busy"
    given = FabricConfig(max_ops=3)
    assert settings.fabric_config(given, {"ASYNCFABRIC_NIXL_RAILS": "local"}) is given
    both = {"ASYNCFABRIC_RAILS": "local", "ASYNCFABRIC_NIXL_RAILS": " "}
    assert settings.fabric_config(None, both).rails == ("local",)  # those of every integration; empty is not set
    assert settings.fabric_config(None, both | {"ASYNCFABRIC_NIXL_RAILS": "tcp:lo"}).rails == ("tcp:lo",)
    bad = (("ASYNCFABRIC_NIXL_RAILS", "a b"), ("ASYNCFABRIC_RAILS", "a b"), ("ASYNCFABRIC_NIXL_POLLING", "never"))
    for name, value in bad:
        with pytest.raises(ValueError, match=name):
            settings.fabric_config(None, {name: value})
    assert settings.wants_telemetry({"NIXL_TELEMETRY_ENABLE": "y"}) and not settings.wants_telemetry({})
