"""What an agent's fabric is opened with: the configuration that its maker gives, or the environment.

Read once per agent, in the thread that makes it.

ASYNCFABRIC_NIXL_RAILS: rails separated by commas, as in `FabricConfig(rails=...)`: "local,tcp:eth0". Not set: those of
ASYNCFABRIC_RAILS, and without it the default of FabricConfig.
ASYNCFABRIC_NIXL_POLLING: adaptive or busy.
NIXL_TELEMETRY_ENABLE: y, yes, on, true or 1 capture telemetry, as with NIXL.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

from asyncfabric import FabricConfig
from asyncfabric.config import Polling
from asyncfabric.integrations.rails_variable import config_from

RAILS, POLLING, TELEMETRY = "ASYNCFABRIC_NIXL_RAILS", "ASYNCFABRIC_NIXL_POLLING", "NIXL_TELEMETRY_ENABLE"
_YES = frozenset(("y", "yes", "on", "true", "1"))


def fabric_config(given: FabricConfig | None, environment: Mapping[str, str] = os.environ) -> FabricConfig:
    """Return the configuration: the given one, otherwise that of the environment.

    Raises:
        ValueError: a variable holds no rails, or no polling mode; the text names the variable.
    """
    if given is not None:
        return given
    config = config_from(environment, RAILS)
    mode = environment.get(POLLING, "").strip()
    for known in get_args(Polling):
        if known == mode:
            config = replace(config, polling=known)
    if mode and config.polling != mode:
        raise ValueError(f"environment variable {POLLING}: {mode!r} is none of {get_args(Polling)}")
    return config


def wants_telemetry(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment switches telemetry on."""
    return environment.get(TELEMETRY, "").strip().lower() in _YES
