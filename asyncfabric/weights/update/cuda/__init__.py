"""asyncfabric.weights.update.cuda: weights on a GPU: the `Device` that torch and our kernels make. No logic.

Imported when the first shard or replica on a GPU is; the files of this folder import torch.
"""
