"""The training loop of experiments, for libraries that have a Python side.

It does what XAgg's package lab/loop does: compute, which is a sleep, hand over
gradients bucket by bucket, wait for their sums, and write one JSON object per
round on its output. All times are CLOCK_MONOTONIC.
"""

import ctypes
import json
import os
import signal
import time

import numpy

# linux/prctl.h
PR_SET_PDEATHSIG = 1


def die_with_parent():
    """Have the kernel kill this process when its parent has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Plan:
    """What a rank does: the folder that package lab/peers has written."""

    def __init__(self, folder, rank):
        """Read the plan and the values of all ranks."""
        with open(os.path.join(folder, 'plan.json'), encoding='utf-8') as file:
            plan = json.load(file)
        self.ranks = plan['ranks']
        self.sizes = plan['buckets']  # values of each
        self.ready = plan['ready'][rank]  # by round and bucket: ns
        self.values, self.sums = [], []  # of a round, by step
        for step in range(plan['steps']):
            ranks = [numpy.fromfile(
                os.path.join(folder, f'values-{step}-{other}.f32'), '<f4')
                for other in range(self.ranks)]
            self.values.append(ranks[rank])
            self.sums.append(sum(vector.astype('f8') for vector in ranks))

    def buckets(self, vector):
        """Return a round's vector as one array per bucket."""
        return numpy.split(vector, numpy.cumsum(self.sizes)[:-1])


class Reducer:
    """An all-reduce of vectors that are given in parts.

    Subclasses sum the array gradients[bucket] over all ranks and leave the
    result in sums[bucket], which may be the same array.
    """

    def __init__(self, plan):
        """Make room for a round's vectors."""
        self.gradient = numpy.zeros(sum(plan.sizes), '<f4')
        self.sum = self.gradient
        self.gradients = self.sums = plan.buckets(self.gradient)

    def start(self, bucket):
        """Begin the all-reduce of a bucket."""
        raise NotImplementedError

    def sleep(self, until):
        """Return at a time, while what was begun goes on."""
        sleep(until)

    def finish(self):
        """Wait for all buckets; return when each one's sums were usable."""
        raise NotImplementedError


def sleep(until):
    """Return at a time of the monotonic clock."""
    left = until - time.monotonic_ns()
    if left > 0:
        time.sleep(left / 1e9)


def run(plan, reducer, out):
    """Go through all rounds, and write a line about each.

    What a round's sums are worth is looked at while the next round computes.
    Only where the computation is shorter than that, it ends later by the rest.
    """
    last = None  # not written yet

    def write():
        if last is not None:
            want = plan.sums[last['round'] % len(plan.sums)]
            last['error'] = error(reducer.sum, want)
            print(json.dumps(last), file=out, flush=True)

    for index, ready in enumerate(plan.ready):
        begin = time.monotonic_ns()
        write()
        reducer.gradient[:] = plan.values[index % len(plan.values)]
        late = max(0, time.monotonic_ns() - begin - ready[0])
        ready = [after + late for after in ready]
        for bucket, after in enumerate(ready):
            reducer.sleep(begin + after)
            reducer.start(bucket)
        done = [at - begin for at in reducer.finish()]
        last = {'round': index, 'begin': begin, 'ready': ready, 'done': done}
    write()


def error(have, want):
    """Return the L2 norm of the difference, relative to that of want."""
    norm = numpy.linalg.norm(want)
    return float(numpy.linalg.norm(have - want) / (norm or 1))
