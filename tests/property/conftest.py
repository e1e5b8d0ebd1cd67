"""Hypothesis profiles of ring 2: the same examples in each run, no deadline per example since machines are shared."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports by path, which leaves siblings out

settings.register_profile(
    "ring",
    deadline=None,
    derandomize=True,
    max_examples=40,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("ring")
