"""The fuzzer of the control plane for a few seconds; ASYNCFABRIC_FUZZ_S=600 runs it longer, another seed each time."""

from __future__ import annotations

import logging
import os
import random

import control_fuzz
import pytest


@pytest.mark.slow
def test_hostile_bytes_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "asyncfabric.control")
    asked = os.environ.get("ASYNCFABRIC_FUZZ_S")
    tried = control_fuzz.main(float(asked or 3), random.randrange(1 << 30) if asked else 1)
    # It only means something when both halves were met: bytes that are refused, and bytes that are believed.
    assert tried["malformed"] and tried["types"] and tried["tag"] and tried["version"] and tried["Parcel"]
    assert tried["body"] and tried["no body"] and tried["no address"]
