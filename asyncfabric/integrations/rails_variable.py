"""Rails and secret of fabrics that integrations open by themselves, from the environment: one rule for all of them.

ASYNCFABRIC_RAILS names the rails, separated by commas as in `local,tcp:eth0`; a variable of one integration goes first
for its fabrics alone, as ASYNCFABRIC_NIXL_RAILS for NIXL agents. ASYNCFABRIC_SECRET is the path of the file with the
secret that peers must prove (`FabricConfig.secret`). An empty variable is not set. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncfabric.config import FabricConfig

RAILS_VARIABLE = "ASYNCFABRIC_RAILS"
SECRET_VARIABLE = "ASYNCFABRIC_SECRET"


def config_from(environment: Mapping[str, str], own: str = RAILS_VARIABLE) -> FabricConfig:
    """Return the defaults of FabricConfig with the rails that variable `own`, or else ASYNCFABRIC_RAILS, names.

    The secret is in the file that ASYNCFABRIC_SECRET names; it is read when the fabric is opened.

    Raises:
        ValueError: a malformed rail; the text names the variable.
    """
    secret = environment.get(SECRET_VARIABLE) or None
    for variable in (own, RAILS_VARIABLE):
        rails = tuple(rail.strip() for rail in environment.get(variable, "").split(",") if rail.strip())
        if rails:
            try:
                return FabricConfig(rails=rails, secret=secret)
            except ValueError as error:
                raise ValueError(f"environment variable {variable}: {error}") from None
    return FabricConfig(secret=secret)
