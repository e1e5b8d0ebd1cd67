"""Which engine a prefill or decode node has, as the settings choose. The package of an engine is imported here."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from asyncfabric_services.nodes.engine import DecodeEngine, PrefillEngine
from asyncfabric_services.nodes.stage import Stage
from asyncfabric_services.router.server import StartError
from asyncfabric_services.settings.schema import Settings


def open_prefill_engine(stage: Stage) -> AbstractAsyncContextManager[PrefillEngine]:
    """Open the engine that the settings choose; its package is imported here. Raises StartError."""
    if stage.settings.engine.kind == "vllm":
        from asyncfabric_services.nodes.vllm.prefilling import open_vllm_prefill

        return open_vllm_prefill(stage)
    refuse_arguments(stage.settings)
    from asyncfabric_services.nodes.prefiller import open_paged_prefill

    return open_paged_prefill(stage)


def open_decode_engine(stage: Stage) -> AbstractAsyncContextManager[DecodeEngine]:
    """Open the engine that the settings choose; its package is imported here. Raises StartError."""
    if stage.settings.engine.kind == "vllm":
        from asyncfabric_services.nodes.vllm.decoding import open_vllm_decode

        return open_vllm_decode(stage)
    refuse_arguments(stage.settings)
    from asyncfabric_services.nodes.decoder import open_paged_decode

    return open_paged_decode(stage)


def refuse_arguments(settings: Settings) -> None:
    """Raise StartError for arguments of an engine that the reference runner has not."""
    if settings.engine.args:
        raise StartError(f"engine.args are vLLM's, and the engine is {settings.engine.kind}: give --engine vllm")
