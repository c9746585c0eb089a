#!/usr/bin/python3
"""XAgg's demo in Mininet: real gradients summed in three ways.

Starts the star of xagg_mininet.py with a switch, an aggregation server, a
controller and one worker process per host, all-reduces recorded gradients in
the modes switch, server and hybrid, and compares every integer that every
worker received with a plain loop's sum of the quantized inputs. Prints a table
on stdout, and exits with 0 only if all are equal.

Needs root, Mininet and the xagg binary.
"""

import argparse
import array
import ast
import contextlib
import glob
import json
import os
import re
import shutil
import statistics
import struct
import subprocess
import sys

from mininet.log import setLogLevel
from mininet.net import Mininet

import record
from running import INTERRUPTED, LabError, end, notice, tail, wait_for
from xagg_mininet import (HERE, RECORD, SWITCH, SimpleSwitchGrpc, XAggEngine,
                          XAggHost, XAggTopo, worker_address)

MODES = ['switch', 'server', 'hybrid']
REPEATS = 3  # all-reduces of each step
SWITCHES = {cls.kind: cls for cls in (XAggEngine, SimpleSwitchGrpc)}
INT32_MAX = 2**31 - 1


def read_npy(path):
    """Read a one-dimensional float32 array from a .npy file."""
    with open(path, 'rb') as file:
        magic, length = struct.unpack('<6s2xH', file.read(10))
        if magic != b'\x93NUMPY':
            raise LabError(f'read {path}: not a .npy file')
        header = ast.literal_eval(file.read(length).decode('latin1'))
        values = array.array('f', file.read())
    if header['descr'] != '<f4' or header['shape'] != (len(values),):
        raise LabError(f'read {path}: want one-dimensional little-endian '
                       f'float32, have {header}')
    return values


def read_steps(folder, ranks):
    """Read the gradients: a list of steps, each a list of ranks' vectors."""
    names = []
    for rank in range(ranks):
        found = sorted(glob.glob(os.path.join(folder, f'*rank{rank}.npy')))
        if not found or rank and len(found) != len(names[0]):
            raise LabError(f'{folder}: {len(found)} files of rank {rank}')
        names.append(found)
    return [[read_npy(path) for path in step] for step in zip(*names)]


def float32(value):
    """Round to float32."""
    return struct.unpack('f', struct.pack('f', value))[0]


class Oracle:
    """The sums that workers must receive, by plain loops of its own."""

    def __init__(self, steps, rounds):
        self.steps = steps
        self.ranks = len(steps[0])
        self.limit = INT32_MAX // self.ranks
        self.schedule = [steps[index // REPEATS % len(steps)]
                         for index in range(rounds)]
        # What clipping left over, by rank and length of vector, and lane.
        self.residual = [{} for _ in range(self.ranks)]

    def lanes(self, rank, values, exponent):
        """Quantize: round(x * 2^exponent), half to even, within the limit."""
        scale = 2.0 ** exponent
        lanes = [round(value * scale) for value in values]
        residual = self.residual[rank].get(len(values), {})
        for i, rest in residual.items():
            lanes[i] = round(float32(values[i] + rest) * scale)
        left = {}
        if max(lanes, default=0) > self.limit or \
                min(lanes, default=0) < -self.limit:
            for i, lane in enumerate(lanes):
                if abs(lane) > self.limit:
                    lanes[i] = self.limit if lane > 0 else -self.limit
                    scaled = float32(values[i] + residual.get(i, 0)) * scale
                    left[i] = float32((scaled - lanes[i]) / scale)
        self.residual[rank][len(values)] = left
        return lanes

    def sums(self, index, exponent):
        """Return the sums of an all-reduce; they are asked for in order."""
        vectors = [self.lanes(rank, values, exponent)
                   for rank, values in enumerate(self.schedule[index])]
        return array.array('i', map(sum, zip(*vectors)))


class Demo:
    """A running network with its daemons."""

    def __init__(self, args, folder):
        self.args = args
        self.folder = folder
        self.stack = contextlib.ExitStack()
        self.daemons = {}
        self.topo = XAggTopo(workers=args.workers, servers=1)
        params = {'binary': args.xagg} if args.switch == 'engine' else {}
        cls = SWITCHES[args.switch]
        self.net = Mininet(topo=self.topo, host=XAggHost, controller=None,
                           switch=lambda name, **kw: cls(name, **kw, **params))

    def __enter__(self):
        self.stack.callback(self.net.stop)
        try:
            self.start()
        except BaseException:
            self.stack.close()
            raise
        return self

    def __exit__(self, *_):
        self.stack.close()

    def socket(self, name):
        """Return the address of a unix socket; all nodes see the same."""
        return f'unix:{os.path.join(self.folder, name)}.sock'

    def start(self):
        """Start switch, server and controller, and wait for them."""
        self.net.start()
        switch = self.net[SWITCH]
        wait_for('start the switch', switch.connected)
        agents = []
        for name in self.topo.servers:
            agents.append(self.socket(name))
            host = self.net[name]
            self.daemon(name, host, 'server', '--interface',
                        host.defaultIntf().name, '--listen', agents[-1],
                        '--name', name, '--no-pin')
        last = self.args.workers - 1
        jobs = [{'name': mode, 'ranks': self.args.workers,
                 'max_elems': self.args.elems,
                 'policy': {'rule': 'static', 'mode': mode,
                            'steer': [last] if mode == 'hybrid' else []}}
                for mode in self.args.modes]
        config = os.path.join(self.folder, 'controller.yaml')
        with open(config, 'w', encoding='utf-8') as file:
            # JSON is YAML.
            json.dump(self.topo.controller_config(
                switch.address, agents, self.socket('controller'), jobs), file)
        self.daemon('controller', switch, 'controller', '--config', config)
        wait_for('start the controller', lambda: self.alive()
                 and os.path.exists(self.socket('controller')[5:]))

    def daemon(self, name, node, *command):
        """Start a process of xagg on a node."""
        path = os.path.join(self.folder, f'{name}.log')
        with open(path, 'wb') as log:
            process = node.popen([self.args.xagg, *command], stdout=log,
                                 stderr=subprocess.STDOUT)
        self.daemons[name] = process, path
        self.stack.callback(end, process)

    def alive(self):
        """Return true, or raise what a process that has ended said last."""
        for name, (process, path) in self.daemons.items():
            if process.poll() is not None:
                raise LabError(f'{name} has ended:\n{tail(path)}')
        return True

    def run(self, mode):
        """Run the workers of a mode; return their lines and folder."""
        folder = os.path.join(self.folder, mode)
        os.mkdir(folder)
        workers = []
        for rank, name in enumerate(self.topo.workers):
            path = os.path.join(folder, f'w{rank}')
            with open(path + '.out', 'wb') as out, \
                    open(path + '.log', 'wb') as log:
                workers.append(self.net[name].popen([
                    self.args.xagg, 'worker', '--job', mode,
                    '--controller', self.socket('controller'),
                    '--rank', str(rank), '--ip', worker_address(rank)[0],
                    '--grads', self.args.grads, '--dump', folder,
                    '--rounds', str(self.args.rounds),
                ], stdout=out, stderr=log))
            self.stack.callback(end, workers[-1])
        wait_for(f'mode {mode}', lambda: self.alive() and all(
            worker.poll() is not None for worker in workers), 300)
        lines = []
        for rank, worker in enumerate(workers):
            path = os.path.join(folder, f'w{rank}')
            if worker.returncode != 0:
                raise LabError(f'mode {mode}: worker {rank} failed:\n'
                               + tail(path + '.log'))
            with open(path + '.out', encoding='utf-8') as out:
                lines.append([json.loads(line) for line in out])
        return lines, folder


def compare(lines, folder, oracle, rounds):
    """Return what is wrong with the integers of a mode, or None."""
    for rank, reported in enumerate(lines):
        if [line['index'] for line in reported] != list(range(rounds)):
            return f'rank {rank} reports {len(reported)} of {rounds}'
    for index in range(rounds):
        exponents = {reported[index]['exponent'] for reported in lines}
        if len(exponents) != 1:
            return f'all-reduce {index}: exponents {sorted(exponents)}'
        want = oracle.sums(index, exponents.pop())
        for rank in range(len(lines)):
            path = os.path.join(folder, f'round{index:03d}-rank{rank}.i32')
            with open(path, 'rb') as file:
                have = array.array('i', file.read())
            if have != want:
                return (f'all-reduce {index}: rank {rank} has other integers '
                        'than a plain sum')
    return None


def parse():
    """Parse the command line."""
    root = os.path.dirname(os.path.dirname(HERE))
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--xagg', default=os.path.join(root, 'build', 'xagg'),
                        help='the xagg binary (default %(default)s)')
    parser.add_argument('--grads', default=os.path.join(root, 'lab', 'data'),
                        help='directory of *rank{R}.npy (default %(default)s)')
    parser.add_argument('--switch', choices=SWITCHES, default='engine')
    parser.add_argument('--mode', choices=MODES, action='append', dest='modes',
                        help='may be repeated (default: all)')
    parser.add_argument('--workers', type=int, default=4)
    parser.add_argument('--rounds', type=int, default=0,
                        help=f'all-reduces (default: each step {REPEATS} '
                        'times)')
    args = parser.parse_args()
    args.modes = args.modes or MODES
    if os.geteuid() != 0:
        parser.exit(3, 'demo.py: Mininet needs root\n')
    if not os.access(args.xagg, os.X_OK):
        parser.exit(3, f'demo.py: no program {args.xagg}; run make build\n')
    if args.switch != 'engine' and not shutil.which(args.switch):
        parser.exit(3, f'demo.py: {args.switch} is not on PATH\n')
    return args


def main():
    """Run the demo; return the exit code."""
    args = parse()
    notice()
    setLogLevel('warning')
    for folder in record.sweep():
        print(f'removed {folder}, which a run that was killed has left',
              file=sys.stderr)
    steps = read_steps(args.grads, args.workers)
    args.rounds = args.rounds or REPEATS * len(steps)
    args.elems = max(len(vector) for step in steps for vector in step)
    rows, exact = [], True
    with contextlib.closing(RECORD), \
            Demo(args, RECORD.folder('xagg-mininet-')) as demo:
        for mode in args.modes:
            print(f'mode {mode}', file=sys.stderr)
            lines, dumps = demo.run(mode)
            wrong = compare(lines, dumps, Oracle(steps, args.rounds),
                            args.rounds)
            exact = exact and wrong is None
            total = [line for reported in lines for line in reported]
            rows.append([
                mode, args.switch, args.workers, args.rounds,
                f'{1000 * statistics.median(x["seconds"] for x in total):.1f}',
                sum(line['packets'] for line in total),
                sum(line['resends'] for line in total),
                'yes' if wrong is None else f'NO: {wrong}'])
    head = ['mode', 'switch', 'workers', 'all-reduces', 'median ms', 'packets',
            'resends', 'exact']
    table = [list(map(str, row)) for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*table)]
    for row in table:
        print(re.sub(' +$', '', '  '.join(
            cell.ljust(width) for cell, width in zip(row, widths))))
    return 0 if exact else 1


if __name__ == '__main__':
    try:
        sys.exit(main())
    except LabError as err:
        sys.exit(f'demo.py: {err}')
    except KeyboardInterrupt:
        print('demo.py: interrupted', file=sys.stderr)
        sys.exit(INTERRUPTED)
