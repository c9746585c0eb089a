#!/usr/bin/python3
"""XAgg's comparison of ways of aggregating, in Mininet.

    bench.py [--switch KIND]... [--out FILE] SCENARIO...
             [-- OPTIONS OF xagg bench run]

For each switch and scenario it starts the star of xagg_mininet.py with the
links that the scenario wants, and has `xagg bench run` do the rest on these
hosts. All results go to one file, of which `xagg bench report` makes a report
at the end.

The real simple_switch_grpc is several times slower than the engine. For it,
scenarios are made slower, so that the network is what they measure; their
names say so.

Needs root, Mininet and the xagg binary.
"""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time

try:
    from mininet.log import setLogLevel
    from mininet.net import Mininet
except ImportError as err:
    print(f'bench.py: {err} (apt-get install mininet)', file=sys.stderr)
    sys.exit(3)

import record
from running import (INTERRUPTED, Interrupt, LabError, end, notice, tail,
                     wait_for)
from xagg_mininet import (HERE, RECORD, SWITCH, PlainLinks, SimpleSwitchGrpc,
                          XAggEngine, XAggHost, XAggTopo, die_with)
from mininet.node import Host

MTU = 1500
ETHERNET = 14


class Engine(XAggEngine):
    """XAgg's engine, which loses frames where a scenario wants it."""

    def __init__(self, name, losses=None, seed=0, **params):
        """Make the switch; losses are shares of frames by port."""
        super().__init__(name, **params)
        self.verb = [*self.verb, *(
            f'--fault=port={port},drop={loss},seed={seed},all=true'
            for port, loss in (losses or {}).items())]


class SimpleSwitch(SimpleSwitchGrpc):
    """The real simple_switch_grpc, whose links lose frames by netem."""

    def __init__(self, name, losses=None, seed=0, **params):
        """Make the switch; netem takes no seed."""
        del seed
        super().__init__(name, **params)
        self.losses = losses or {}


SWITCHES = {cls.kind: cls for cls in (Engine, SimpleSwitch)}
SLOW = {Engine.kind: 1, SimpleSwitch.kind: 2}


class Wire(PlainLinks, Host):
    """A bridge in the middle of an aggregation server's link.

    What XDP transmits (XDP_TX) passes no queue of the server's, so that the
    one that limits its rate has to be one hop away.
    """

    DOWN, UP = 0, 1  # towards the server and towards the switch

    def veth_options(self, port):
        """Let the server's native XDP deliver here."""
        return ['--pass-xdp'] if port == self.DOWN else []

    def join(self):
        """Join both ends."""
        self.run('ip link add br0 type bridge mcast_snooping 0')
        for intf in self.intfs.values():
            self.run(f'ip link set {intf.name} master br0')
        self.run('ip link set br0 up')

    def run(self, command):
        """Run a command that has to succeed."""
        out, error, code = self.pexec(command)
        if code != 0:
            raise LabError(f'{self.name}: {command}: {out}{error}'.strip())


class BenchTopo(XAggTopo):
    """The star with wires."""

    def build(self, *args, **params):
        """Add hosts and links."""
        self.wires = []
        super().build(*args, **params)

    def _attach(self, switch, name, address, port):
        if name not in self.servers:
            super()._attach(switch, name, address, port)
            return
        wire = f'{name}-br'
        self.wires.append(wire)
        self.addHost(wire, cls=Wire, ip=None)
        super()._attach(wire, name, address, Wire.DOWN)
        self.addLink(wire, switch, port1=Wire.UP, port2=port)


def limit(intf, rate, loss=0.0):
    """Limit what leaves an interface, as the other labs of XAgg do.

    The bucket holds a millisecond's worth, and at least two full frames; the
    queue before it 50 ms, and at least 256 KiB.
    """
    if rate:
        size = rate // 8
        burst = max(size // 1000, 2 * (MTU + ETHERNET))
        queue = burst + max(size // 20, 256 << 10)
        tc(intf, f'root handle 1: tbf rate {rate}bit burst {burst} '
                 f'limit {queue}')
    if loss:
        parent = 'parent 1:1' if rate else 'root'
        try:
            tc(intf, f'{parent} netem limit 10000 loss {100 * loss}%')
        except LabError as error:
            raise LabError(f'{error} (losses need netem in the kernel; '
                           f'{Engine.kind} has its own)') from error


def tc(intf, qdisc):
    """Add a queueing discipline to an interface."""
    command = f'tc qdisc add dev {intf.name} {qdisc}'
    out, error, code = intf.node.pexec(command)
    if code != 0:
        raise LabError(f'{intf.node.name}: {command}: {out}{error}'.strip())


class Star:
    """A running network with its switch, for one scenario."""

    def __init__(self, args, kind, scenario, folder):
        """Plan it; scenario is what `xagg bench topology` says."""
        self.links = scenario['links']
        self.folder = folder
        self.stack = contextlib.ExitStack()
        self.topo = BenchTopo(workers=scenario['workers'],
                              servers=scenario['servers'],
                              others=scenario['others'])
        params = {'seed': scenario['seed'], 'losses': {
            self.topo.port(SWITCH, name)[0]: link['loss']
            for name, link in self.links.items() if link['loss']}}
        if kind == Engine.kind:
            params['binary'] = args.xagg
        cls = SWITCHES[kind]
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

    def start(self):
        """Start the switch on links with the rates of the scenario."""
        for name in self.topo.wires:
            self.net[name].join()
        switch = self.net[SWITCH]
        losses = getattr(switch, 'losses', {})
        for name, link in self.links.items():
            host = self.net[name]
            port, intf = self.port(name)
            loss = losses.get(port, 0.0)
            if name in self.topo.servers:
                near = self.net[f'{name}-br'].intfs[Wire.UP]
            else:
                near = host.defaultIntf()
            limit(near, link['rate'], loss)
            limit(intf, link['rate'], loss)
        self.net.start()
        wait_for('start the switch', switch.connected)

    def port(self, name):
        """Return the switch's port to a host, and its interface."""
        near = f'{name}-br' if name in self.topo.servers else name
        port = self.topo.port(SWITCH, near)[0]
        return port, self.net[SWITCH].intfs[port]

    def hosts(self):
        """Write what there is for xagg bench run; return the file."""
        switch = self.net[SWITCH]
        hosts = []
        for name in self.links:
            host = self.net[name]
            intf = host.defaultIntf()
            port, there = self.port(name)
            hosts.append({
                'name': name, 'netns': namespace(host), 'mac': intf.MAC(),
                'address': f'{intf.IP()}/{intf.prefixLen}', 'port': port,
                'interface': intf.name, 'port_interface': there.name})
        path = os.path.join(self.folder, 'hosts.json')
        with open(path, 'w', encoding='utf-8') as file:
            json.dump({
                'lab': 'mininet', 'hosts': hosts,
                'wires': [namespace(self.net[name])
                          for name in self.topo.wires],
                'switch': {'kind': switch.kind, 'netns': namespace(switch),
                           'address': switch.address,
                           'pid': switch.process.pid}}, file)
        return path


def namespace(node):
    """Return the file through which a node's network can be entered."""
    return f'/proc/{node.pid}/ns/net'


def xagg(args, *command):
    """Return what a command of xagg's prints."""
    result = subprocess.run([args.xagg, *command], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, check=False, text=True)
    if result.returncode != 0:
        raise LabError(f'xagg {" ".join(command)}: {result.stderr.strip()}')
    return result.stdout


def run(args, kind, path, folder):
    """Run a scenario in all modes; return the exit code."""
    scenario = json.loads(xagg(args, 'bench', 'topology', '--slow',
                               str(SLOW[kind]), path))
    file = os.path.join(folder, 'scenario.yaml')
    with open(file, 'w', encoding='utf-8') as out:
        out.write(scenario['yaml'])
    with Star(args, kind, scenario, folder) as star:
        parent = os.getpid()
        # A process group of its own: whoever interrupts this one interrupts
        # the other through it, once.
        process = subprocess.Popen(
            [args.xagg, 'bench', 'run', '--hosts', star.hosts(), '--file',
             file, '--out', args.out, '--append', *args.options],
            stdout=subprocess.DEVNULL,  # the report comes when all is there
            start_new_session=True, preexec_fn=lambda: die_with(parent))
        try:
            while process.poll() is None and not Interrupt.noted:
                time.sleep(0.1)
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(60)
        finally:
            end(process)
        if process.returncode == 0 or Interrupt.noted:
            return process.returncode
        if star.net[SWITCH].process.poll() is not None:
            raise LabError('the switch has ended:\n'
                           + tail(star.net[SWITCH].log))
        return process.returncode


def parse():
    """Parse the command line."""
    root = os.path.dirname(os.path.dirname(HERE))
    build = os.path.join(root, 'build')
    parser = argparse.ArgumentParser(
        description=__doc__.split('\n', maxsplit=1)[0])
    parser.add_argument('--xagg', default=os.path.join(build, 'xagg'),
                        help='the xagg binary (default %(default)s)')
    parser.add_argument('--switch', choices=SWITCHES, action='append',
                        dest='switches', help='may be repeated (default: all '
                        'that are installed)')
    parser.add_argument('--out', metavar='FILE',
                        default=os.path.join(build, 'bench', 'mininet.jsonl'),
                        help='JSON lines to write (default %(default)s); '
                        'reports are beside it')
    parser.add_argument('scenarios', nargs='+', metavar='SCENARIO')
    own, options = sys.argv[1:], []
    if '--' in own:
        at = own.index('--')
        own, options = own[:at], own[at + 1:]
    args = parser.parse_args(own)
    args.options = options
    args.switches = args.switches or [
        kind for kind, cls in SWITCHES.items()
        if cls is Engine or shutil.which(cls.program)]
    if os.geteuid() != 0:
        parser.exit(3, 'bench.py: Mininet needs root\n')
    if not os.access(args.xagg, os.X_OK):
        parser.exit(3, f'bench.py: no program {args.xagg}; run make build\n')
    for kind in args.switches:
        if kind != Engine.kind and not shutil.which(kind):
            parser.exit(3, f'bench.py: {kind} is not on PATH\n')
    return args


def main():
    """Run all scenarios; return the exit code."""
    args = parse()
    notice()
    setLogLevel('warning')
    for folder in record.sweep():
        print(f'removed {folder}, which a run that was killed has left',
              file=sys.stderr)
    os.makedirs(os.path.dirname(os.path.abspath(args.out)), exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(args.out)
    code = 0
    with contextlib.closing(RECORD):
        folder = RECORD.folder('xagg-mininet-')
        for kind, path in itertools.product(args.switches, args.scenarios):
            print(f'{path} with {kind}', file=sys.stderr)
            try:
                code = run(args, kind, path, folder) or code
            except LabError as error:
                print(f'bench.py: {path} with {kind}: {error}',
                      file=sys.stderr)
                code = 1
            except KeyboardInterrupt:
                pass
            if Interrupt.noted:
                break
    report(args)
    if Interrupt.noted:
        raise KeyboardInterrupt
    return code


def report(args):
    """Write what there is; after an interrupt, what was finished."""
    if not os.path.exists(args.out):
        return
    base = os.path.splitext(args.out)[0]
    for form, suffix in ('html', '.html'), ('markdown', '.md'):
        xagg(args, 'bench', 'report', args.out, '--output', form,
             '--out', base + suffix)
    print(f'the report is {base}.html, and {base}.md')


if __name__ == '__main__':
    try:
        sys.exit(main())
    except LabError as err:
        sys.exit(f'bench.py: {err}')
    except KeyboardInterrupt:
        print('bench.py: interrupted', file=sys.stderr)
        sys.exit(INTERRUPTED)
