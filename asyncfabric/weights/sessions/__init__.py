"""asyncfabric.weights.sessions: weights in three calls. The door of this room; no logic. Needs torch.

A trainer's rank:    async with open_sender(model, join) as sender: await sender.publish(version)
An engine's rank:    async with open_receiver(named_tensors, join) as receiver: receiver.poll(), receiver.apply()
Where they meet:     the address of a directory, a torch.distributed store, LocalJoin in one process

`asyncfabric.weights.blocking` has the same calls for programs without an event loop. Plans, channels, the coordinator
and its log are chosen here; who wants to choose them uses `asyncfabric.weights.update`.
"""

from asyncfabric.weights.sessions.conversions import CONVERSIONS, Conversion
from asyncfabric.weights.sessions.directory import DirectoryJoin, Meeting
from asyncfabric.weights.sessions.join import Join, LocalJoin, StoreJoin
from asyncfabric.weights.sessions.receiver import WeightReceiver, open_receiver
from asyncfabric.weights.sessions.sender import WeightSender, open_sender

__all__ = [
    "CONVERSIONS",
    "Conversion",
    "DirectoryJoin",
    "Join",
    "LocalJoin",
    "Meeting",
    "StoreJoin",
    "WeightReceiver",
    "WeightSender",
    "open_receiver",
    "open_sender",
]
