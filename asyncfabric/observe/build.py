"""What this build of asyncfabric contains. Any thread; nothing is opened, but the compiled engine is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from asyncfabric._bridge.native import read_native_build


@dataclass(frozen=True, slots=True)
class Build:
    """What was compiled, by which compiler, from which commit.

    Attributes:
        version: of the package when the engine was compiled.
        commit: of a wheel; "" where none was recorded, as in a checkout.
        providers: names compiled in, whether or not their library and hardware are here.
        compiler: its name and version.
        glibc: the version that the engine was compiled for; newer ones run it too.
        sanitize: the sanitizers compiled in, separated by commas; "" for none.
        debug: with assertions and without optimisation.
    """

    version: str
    commit: str
    providers: frozenset[str]
    compiler: str
    glibc: str
    sanitize: str
    debug: bool


def read_build() -> Build:
    """Read what the compiled engine contains.

    Raises:
        DeviceError: the compiled engine is not there.
    """
    facts = read_native_build()
    return Build(**facts | {"providers": frozenset(facts["providers"])})
