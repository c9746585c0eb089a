"""A rank that all-reduces with Open MPI, through mpi4py.

    mpi.py FOLDER

follows the plan in the folder. It is started by mpirun.py's daemons, and
writes to the output of its daemon.
"""

import os
import sys
import time

import mpi4py
import numpy

import loop

mpi4py.rc.thread_level = 'funneled'
from mpi4py import MPI  # noqa: E402 (it starts MPI)

# Seconds between looks at what is under way. Open MPI makes progress in calls
# of its functions only, and those that wait keep a core busy.
POLL = 250e-6


class OpenMPI(loop.Reducer):
    """Sums into another array: only then Open MPI's way is a ring."""

    def __init__(self, plan):
        super().__init__(plan)
        self.sum = numpy.zeros_like(self.gradient)
        self.sums = plan.buckets(self.sum)
        self.done = [0] * len(self.sums)
        self.under_way = {}  # by bucket

    def start(self, bucket):
        """Begin the all-reduce of a bucket."""
        self.under_way[bucket] = MPI.COMM_WORLD.Iallreduce(
            self.gradients[bucket], self.sums[bucket])

    def look(self):
        """Have MPI make progress, and note what is done."""
        for bucket, request in list(self.under_way.items()):
            if request.Test():
                self.done[bucket] = time.monotonic_ns()
                del self.under_way[bucket]

    def sleep(self, until):
        """Return at a time, while what was begun goes on."""
        while self.under_way and time.monotonic_ns() + POLL * 1e9 < until:
            self.look()
            time.sleep(POLL)
        super().sleep(until)

    def finish(self):
        """Wait for all buckets; return when each one's sums were usable."""
        self.look()
        while self.under_way:
            time.sleep(POLL)
            self.look()
        return self.done


def main():
    """Run the command line."""
    daemon = os.getppid()
    loop.die_with_parent()
    plan = loop.Plan(sys.argv[1], MPI.COMM_WORLD.rank)
    MPI.COMM_WORLD.Barrier()  # first computations begin together
    with open(f'/proc/{daemon}/fd/1', 'w', encoding='utf-8') as out:
        loop.run(plan, OpenMPI(plan), out)


if __name__ == '__main__':
    main()
