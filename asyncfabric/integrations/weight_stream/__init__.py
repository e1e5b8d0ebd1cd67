"""asyncfabric.integrations.weight_stream: a stream of named tensors from trainer ranks to rollout ranks, in buckets.

For frameworks that yield whole tensors one after the other at every trainer rank, and load them so at every rollout
rank; memory is two buckets at each. The door of this room; no logic. Needs torch.
"""

from asyncfabric.integrations.weight_stream.packing import ALIGNMENT
from asyncfabric.integrations.weight_stream.post import WeightPost
from asyncfabric.integrations.weight_stream.receiver import BucketReceiver
from asyncfabric.integrations.weight_stream.sender import BucketSender, NamedWeights

__all__ = ["ALIGNMENT", "BucketReceiver", "BucketSender", "NamedWeights", "WeightPost"]
