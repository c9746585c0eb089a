"""One rank of PyTorch's DistributedDataParallel, with Gloo.

    ddp.py STORE RANK RANKS

runs one backward pass of a small network on data of its rank, alone and as
part of the group, and prints the gradients: its own, the sum that Gloo makes
of all ranks' own, and what DistributedDataParallel hands to the optimizer.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)


def network():
    """Return the same network on all ranks."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))


def gradient(model, inputs):
    """Return the gradient of a loss as one vector."""
    model(inputs).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def main():
    """Run the command line."""
    store, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group('gloo', init_method='file://' + store, rank=rank,
                            world_size=ranks)
    torch.manual_seed(100 + rank)
    inputs = torch.randn(32, 16)
    own = gradient(network(), inputs)
    total = own.clone()
    dist.all_reduce(total)
    result = gradient(DistributedDataParallel(network()), inputs)
    print(json.dumps({'own': own.tolist(), 'sum': total.tolist(),
                      'ddp': result.tolist()}))
    dist.barrier()
    dist.destroy_process_group()


main()
