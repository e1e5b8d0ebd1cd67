"""The arguments of a node's vLLM engine: the settings, what the user adds, and our connector in them. Blocking."""

from __future__ import annotations

import json
import os
import shlex
from typing import Any

from asyncfabric_services.exits import EnvironmentUnfit
from asyncfabric_services.router.server import StartError
from asyncfabric_services.settings.schema import Settings

CONNECTOR = "asyncfabric.integrations.vllm"
OURS = ("model", "kv_transfer_config", "tokenizer_mode")


def transfer_config(role: str, name: str, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return vLLM's KVTransferConfig of a node as a dict: our connector; a load that fails is computed again.

    The engine's processes end with this one.
    """
    given = dict(extra or {})
    more = {"ends_with_pid": os.getpid()} | given.pop("kv_connector_extra_config", {})
    return {
        "kv_connector": "Connector",
        "kv_connector_module_path": CONNECTOR,
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "engine_id": name,
        "kv_connector_extra_config": more,
    } | given


def read_arguments(text: str) -> dict[str, Any] | list[str]:
    """Return `engine.args` as engine arguments by name, or as words of a command line; raises ValueError."""
    if not text.lstrip().startswith("{"):
        return shlex.split(text)
    found = json.loads(text)
    if "model" in found:
        raise ValueError("the model is given by --model-path")
    return dict(found)


def engine_arguments(settings: Settings, role: str, name: str) -> Any:
    """Return vLLM's AsyncEngineArgs of a node.

    Raises StartError for arguments that vLLM does not take, and EnvironmentUnfit when vLLM is not installed.
    """
    try:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
    except ModuleNotFoundError as error:
        raise EnvironmentUnfit(f"{error}: --engine vllm runs in an environment with vLLM 0.26 or 0.33") from None
    if settings.model.path is None:
        raise StartError("--engine vllm needs --model-path, a folder or a name that vLLM can load")
    try:
        given = read_arguments(settings.engine.args)
        if isinstance(given, list):
            given = _from_command_line(AsyncEngineArgs, given)
        extra = given.pop("kv_transfer_config", None) or {}
        transfer = KVTransferConfig(**transfer_config(role, name, extra if isinstance(extra, dict) else {}))
        return AsyncEngineArgs(**{**given, "model": str(settings.model.path), "kv_transfer_config": transfer})
    except (TypeError, ValueError) as error:
        raise StartError(f"engine.args: {error}") from error


def _from_command_line(kind: Any, words: list[str]) -> dict[str, Any]:
    """Return the engine arguments that differ from vLLM's defaults."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = kind.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
    try:
        parsed = vars(parser.parse_args(words))
    except SystemExit:
        raise ValueError(f"vLLM does not take {shlex.join(words)!r}; see its log above") from None
    usual = vars(parser.parse_args([]))
    fields = set(kind.__dataclass_fields__)
    return {name: value for name, value in parsed.items() if name in fields and value != usual.get(name)}
