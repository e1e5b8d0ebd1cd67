"""Where values come from: a TOML file, the environment, flags; the later one wins. Reads the file it is given.

The environment is a mapping that the caller gives, so that nothing here depends on the process.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from asyncfabric.unreadable import UNREADABLE
from asyncfabric_services.settings.keys import SettingsError, all_keys, nearest
from asyncfabric_services.settings.schema import Settings

PREFIX = "ASYNCFABRIC_"
FILE_VARIABLE = "ASYNCFABRIC_CONFIG"
OTHER_FAMILIES = (
    "BUILD_",
    "COMMIT",
    "CUDA_",
    "DEBUG",
    "EXPECT_",
    "FAULT_",
    "JOBS",
    "LIBFABRIC_",
    "MOE_",
    "RXE",
    "SANITIZE",
    "STATUS_",
    "STREAMING_",
    "TEST",
    "VERBS_",
    "WERROR",
    "WITH_",
)
"""Beginnings of variables that the engine, the build and the tests read: not settings, and not mistakes."""


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings and where each value came from.

    Attributes:
        settings: the values.
        origins: key -> `default`, `file PATH`, `environment NAME` or `flag --name`.
    """

    settings: Settings
    origins: Mapping[str, str]


def load_settings(
    *, file: Path | None = None, environment: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None
) -> LoadedSettings:
    """Merge the sources; raises SettingsError naming the key, its origin and, for an unknown one, the nearest.

    `file` wins over the file that the environment names; `flags` are keys with text values, None for absent ones.
    """
    environment = environment or {}
    if file is None and environment.get(FILE_VARIABLE):
        file = Path(environment[FILE_VARIABLE]).expanduser()
    given: dict[str, tuple[Any, str]] = {}
    if file is not None:
        given |= _file_values(file)
    given |= _environment_values(environment)
    for name, value in (flags or {}).items():
        if value is not None:
            _known(name, f"flag {name}")
            given[name] = (value, f"flag {all_keys()[name].flag}")
    values: dict[str, Any] = {}
    for name, key in all_keys().items():
        value, origin = given.get(name, (key.default, "default"))
        try:
            values[name] = value if origin == "default" else key.read(value)
        except SettingsError as error:
            raise SettingsError(f"{name} ({origin}): {error}") from None
    sections = {
        section: kind(**{name.partition(".")[2]: one for name, one in values.items() if name.startswith(f"{section}.")})
        for section, kind in get_type_hints(Settings).items()
    }
    origins = {name: given[name][1] if name in given else "default" for name in values}
    return LoadedSettings(Settings(**sections), origins)


def _known(name: str, origin: str) -> None:
    if name not in all_keys():
        raise SettingsError(f"{name} ({origin}): there is no such key{nearest(name, list(all_keys()))}")


def _file_values(file: Path) -> dict[str, tuple[Any, str]]:
    origin = f"file {file}"
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{origin}: cannot be read: {error.strerror}") from None
    except UNREADABLE as error:
        raise SettingsError(f"{origin}: not TOML: {error}") from None
    values = {}
    for section, inner in document.items():
        if not isinstance(inner, dict):
            raise SettingsError(f"{section} ({origin}): keys stand in sections, such as [http]")
        for name, value in inner.items():
            _known(f"{section}.{name}", origin)
            values[f"{section}.{name}"] = (value, origin)
    return values


def _environment_values(environment: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    by_variable = {key.variable: key for key in all_keys().values()}
    values = {}
    for variable, value in environment.items():
        rest = variable.removeprefix(PREFIX)
        if rest == variable or variable == FILE_VARIABLE:
            continue
        if variable in by_variable:
            values[by_variable[variable].name] = (value, f"environment {variable}")
        elif not rest.startswith(OTHER_FAMILIES):
            hint = nearest(variable, list(by_variable))
            raise SettingsError(f"{variable} (environment): there is no such setting{hint}")
    return values
