"""A rank that all-reduces with Gloo, through torch.distributed.

    gloo.py FOLDER RANK

follows the plan in the folder. Buckets are all-reduced as
DistributedDataParallel does it: each as soon as it is ready, several at a
time, by the process group's own threads.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

import loop


class Gloo(loop.Reducer):
    """Sums in place."""

    def __init__(self, plan):
        super().__init__(plan)
        self.tensors = [torch.from_numpy(part) for part in self.gradients]
        self.done = [0] * len(self.tensors)
        self.under_way = []

    def start(self, bucket):
        """Begin the all-reduce of a bucket."""
        def finished(future):
            future.value()  # raises what went wrong
            self.done[bucket] = time.monotonic_ns()

        work = dist.all_reduce(self.tensors[bucket], async_op=True)
        # A thread of Gloo's calls it, also while this one sleeps.
        self.under_way.append(work.get_future().then(finished))

    def finish(self):
        """Wait for all buckets; return when each one's sums were usable."""
        for future in self.under_way:
            future.wait()
        self.under_way.clear()
        return self.done


def main():
    """Run the command line."""
    folder, rank = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    plan = loop.Plan(folder, rank)
    # Ranks find each other through a file. Their traffic goes over the
    # interface that GLOO_SOCKET_IFNAME names.
    store = 'file://' + os.path.join(os.path.abspath(folder), 'store')
    dist.init_process_group('gloo', init_method=store, rank=rank,
                            world_size=plan.ranks)
    dist.barrier()  # first computations begin together
    loop.run(plan, Gloo(plan), sys.stdout)
    dist.barrier()  # nobody leaves whom others need
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
