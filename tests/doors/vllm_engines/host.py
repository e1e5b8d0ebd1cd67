"""vLLM's platform for machines without what is compiled of vLLM; chosen by `choose`, or by vLLM as a plugin."""

from __future__ import annotations

from typing import Any

import vllm.platforms as platforms
from vllm.platforms.cpu import CpuPlatform


class Host(CpuPlatform):
    """vLLM's platform for CPUs, without what looks for a compiled extension or pins threads."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Leave the configuration as the test made it."""

    @classmethod
    def import_kernels(cls) -> None:
        """Import none."""

    @classmethod
    def discover_numa_topology(cls) -> list[list[int]]:
        """Return no cores, so that the connector pins no thread."""
        return []


def platform() -> str:
    """Return the class of the platform, as vLLM's plugins name theirs."""
    return "host.Host"


def choose() -> None:
    """Make it vLLM's platform in this process."""
    platforms._current_platform = Host()
