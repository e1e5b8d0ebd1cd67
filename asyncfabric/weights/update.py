"""asyncfabric.weights.update: carries plans out over a fabric, all or nothing. The door of this room; no logic.

A trainer:        open_publisher, WeightPublisher.publish
A receiver:       open_replica, WeightReplica.step_boundary, .tensors, .current_version
The coordinator:  open_coordinator, WeightCoordinator.update
Their messages go over an asyncfabric.control.Channel of WEIGHT_CODEC: LinkChannels, LocalChannels, or another one.
"""

from asyncfabric.weights.channel import (
    COORDINATOR,
    WEIGHT_CODEC,
    WeightChannel,
    receiver_name,
    receiver_of,
    trainer_name,
)
from asyncfabric.weights.coordinator.coordinator import WeightCoordinator, open_coordinator
from asyncfabric.weights.coordinator.progress import UpdateReport
from asyncfabric.weights.memory.rows import TensorLayout, layout_of
from asyncfabric.weights.messages import CodingReport, WeightMessage, decode_message, encode_message
from asyncfabric.weights.receiver.replica import WeightReplica, open_replica
from asyncfabric.weights.sender.publisher import WeightPublisher, open_publisher
from asyncfabric.weights.sender.version import PublishReport, Stages

__all__ = [
    "COORDINATOR",
    "WEIGHT_CODEC",
    "CodingReport",
    "PublishReport",
    "Stages",
    "TensorLayout",
    "UpdateReport",
    "WeightChannel",
    "WeightCoordinator",
    "WeightMessage",
    "WeightPublisher",
    "WeightReplica",
    "decode_message",
    "encode_message",
    "layout_of",
    "open_coordinator",
    "open_publisher",
    "open_replica",
    "receiver_name",
    "receiver_of",
    "trainer_name",
]
