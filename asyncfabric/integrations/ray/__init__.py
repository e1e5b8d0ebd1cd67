"""asyncfabric.integrations.ray: a tensor transport of Ray that reads tensors out of the actor that made them.

    from asyncfabric.integrations import ray as fabric_transport

    fabric_transport.register()  # once, before actors are created, in the process that creates them

    @ray.remote
    class Trainer:
        @ray.method(tensor_transport="asyncfabric")
        def weights(self): ...

Needs the extra `ray`. `pin` keeps a tensor registered for as long as a program uses it.
"""

from asyncfabric.integrations.ray.transport import AsyncfabricTransport, pin, register, unpin

__all__ = ["AsyncfabricTransport", "pin", "register", "unpin"]
