"""`asyncfabric --version` and `python -m asyncfabric --version` report the build that this interpreter would load."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from asyncfabric.errors import DeviceError
from asyncfabric.observe import build
from asyncfabric_services import version
from asyncfabric_services.cli import asyncfabric


def test_the_module_prints_what_the_command_prints() -> None:
    module = subprocess.run([sys.executable, "-P", "-m", "asyncfabric", "--version"], capture_output=True, text=True)
    assert (module.returncode, module.stderr) == (0, "")
    assert module.stdout == CliRunner().invoke(asyncfabric, ["--version"]).output
    assert module.stdout.startswith(f"asyncfabric {version.installed_version()} (Python ")


def test_what_was_compiled_is_reported() -> None:
    pytest.importorskip("asyncfabric._native", reason="NO BUILD WAS READ: `make build`", exc_type=ImportError)
    facts = json.loads(CliRunner().invoke(asyncfabric, ["version", "--json"]).output)["build"]
    assert facts["version"] == version.installed_version(), "build anew"
    assert "local" in facts["providers"]
    assert facts["compiler"].split()[0] in ("GCC", "Clang", "clang")
    assert [int(part) >= least for part, least in zip(facts["glibc"].split("."), (2, 17), strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"commit": "0123456789ab"}, "  commit      0123456789ab"),
        ({"commit": ""}, "  commit      not recorded"),
        ({"sanitize": "address,undefined"}, "  sanitizers  address,undefined"),
        ({"debug": True, "compiler": "GCC 12"}, "  compiler    GCC 12, for glibc 2.28 and newer, debug"),
        ({"version": "0.0.9"}, "  engine      of version 0.0.9: build it anew"),
    ],
)
def test_lines_state_each_fact(changed: dict[str, object], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"version": version.installed_version(), "commit": "", "providers": ("local",), "compiler": "Clang 22"}
    facts |= {"glibc": "2.28", "sanitize": "", "debug": False} | changed
    monkeypatch.setattr(build, "read_native_build", lambda: facts)
    assert line in list(version.version_lines())


def test_without_an_engine_the_error_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise DeviceError("the compiled engine cannot be loaded: nothing was built")

    monkeypatch.setattr(build, "read_native_build", absent)
    assert list(version.version_lines())[1].startswith("  engine      none: the compiled engine cannot be loaded")
