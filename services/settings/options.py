"""Click options for settings: a flag for each key that a command reads, and `--config`. No services here."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from asyncfabric_services.settings.keys import Key, SettingsError, all_keys
from asyncfabric_services.settings.readers import keys_of, readers_of
from asyncfabric_services.settings.sources import FILE_VARIABLE, LoadedSettings, load_settings

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


UNITS = (
    "DURATION is a number with ms, s, m or h; SIZE is one with KB, MB, GB (powers of ten) or KiB, MiB, GiB (of two). "
    "The environment sets the same (ASYNCFABRIC_HTTP__PORT), and so does a file, where --http-port is port in [http]."
)


class SettingsCommand(click.Command):
    """A command with flags for settings; a flag that only other commands have is refused with their names."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write how values are written, and where else they are set."""
        formatter.write_paragraph()
        formatter.write_text(UNITS)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; raises a usage error for flags that this command does not have."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            readers = [
                one for key in all_keys().values() if key.flag == error.option_name for one in readers_of(key.name)
            ]
            if not readers:
                raise
            raise click.UsageError(
                f"{error.option_name} is no option of `{ctx.command_path}`, which does not read it; "
                f"it is one of `serve {'`, `'.join(readers)}`",
                ctx,
            ) from None


def settings_options(command: str | None = None) -> Decorator:
    """Give a function the flags of the keys that a `serve` command reads, of all keys for None.

    It is called with `loaded`, a LoadedSettings, in their place.
    """
    parameters = {key.flag.removeprefix("--").replace("-", "_"): key for key in keys_of(command).values()}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def with_settings(*positional: Any, config: Path | None, **options: Any) -> Any:
            given = {key: options.pop(parameter) for parameter, key in parameters.items()}
            flags = {key.name: None if key.repeated and not value else value for key, value in given.items()}
            try:
                loaded = load_settings(file=config, environment=os.environ, flags=flags)
            except SettingsError as error:
                raise click.UsageError(str(error)) from None
            return function(*positional, loaded=loaded, **options)

        wrapped: Callable[..., Any] = with_settings
        for parameter, key in reversed(parameters.items()):
            wrapped = click.option(key.flag, parameter, metavar=key.metavar, help=help_of(key), multiple=key.repeated)(
                wrapped
            )
        path = click.Path(exists=True, dir_okay=False, path_type=Path)
        text = f"TOML file with settings, of other commands too (or {FILE_VARIABLE})."
        return click.option("--config", type=path, help=text)(wrapped)

    return decorate


def help_of(key: Key) -> str:
    """Return the help of a flag: the meaning, the range and the default as they are written."""
    facts = [key.range] if key.range else []
    if key.default not in (None, "", ()):
        facts.append(f"default: {key.written}")
    return f"{key.text}  [{'; '.join(facts)}]" if facts else key.text


def shown(loaded: LoadedSettings) -> list[dict[str, Any]]:
    """Return `key value origin` of every key, values as JSON has them."""
    rows = []
    for name, origin in loaded.origins.items():
        section, _, inner = name.partition(".")
        value = getattr(getattr(loaded.settings, section), inner)
        if all_keys()[name].repeated:
            value = ["***"] * len(value)
        rows.append({"key": name, "value": str(value) if isinstance(value, Path) else value, "origin": origin})
    return rows
