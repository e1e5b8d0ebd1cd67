"""What users test their own programs with: an engine of pure Python that keeps the same promises as the native one.

`FakeEngine` stands in for the compiled engine, `FakeNetwork` joins several of them and holds, reorders or breaks what
they send; `FakeLinkNetwork` does so for the control links of nodes. The conformance suite is in
`asyncfabric.testing.conformance`. Nothing here is used by a running fabric.
"""

from asyncfabric.testing.fake_engine import FakeEngine
from asyncfabric.testing.fake_link import FakeLink, FakeLinkNetwork
from asyncfabric.testing.fake_network import FakeNetwork

__all__ = ["FakeEngine", "FakeLink", "FakeLinkNetwork", "FakeNetwork"]
