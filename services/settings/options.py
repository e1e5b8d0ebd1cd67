"""Click options for settings: one flag per key, `--config`, and the settings for the command. No services here."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from asyncfabric_services.settings.keys import SettingsError, all_keys
from asyncfabric_services.settings.sources import FILE_VARIABLE, Loaded, load_settings


def settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command all flags of the settings; it is called with `loaded`, a Loaded, in their place."""
    parameters = {key.flag.removeprefix("--").replace("-", "_"): key for key in all_keys().values()}

    @wraps(command)
    def with_settings(*positional: Any, config: Path | None, **options: Any) -> Any:
        flags = {key.name: options.pop(parameter) for parameter, key in parameters.items()}
        try:
            loaded = load_settings(file=config, environment=os.environ, flags=flags)
        except SettingsError as error:
            raise click.UsageError(str(error)) from None
        return command(*positional, loaded=loaded, **options)

    wrapped: Callable[..., Any] = with_settings
    for parameter, key in reversed(parameters.items()):
        wrapped = click.option(key.flag, parameter, metavar="VALUE", help=f"{key.text} (default: {key.default})")(
            wrapped
        )
    path = click.Path(exists=True, dir_okay=False, path_type=Path)
    return click.option("--config", type=path, help=f"TOML file (or {FILE_VARIABLE}).")(wrapped)


def shown(loaded: Loaded) -> list[dict[str, Any]]:
    """Return `key value origin` of every key, values as JSON has them."""
    rows = []
    for name, origin in loaded.origins.items():
        section, _, inner = name.partition(".")
        value = getattr(getattr(loaded.settings, section), inner)
        rows.append({"key": name, "value": str(value) if isinstance(value, Path) else value, "origin": origin})
    return rows
