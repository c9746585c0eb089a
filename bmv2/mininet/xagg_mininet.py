"""XAgg's star in Mininet: workers and aggregation servers around a P4 switch.

Importable, and usable from Mininet's own command line:

    mn --custom bmv2/mininet/xagg_mininet.py --topo xagg,4,1 \\
       --host xagg --switch xagg_engine --controller none

The switch is XAgg's embedded engine (XAggEngine, a process of `xagg switch`)
or the real simple_switch_grpc (SimpleSwitchGrpc). Both wait for a P4Runtime
client; `xagg controller` with XAggTopo.controller_config() is one.

Addresses are those of all of XAgg's labs: worker r is w{r}, 10.77.0.{r+1} at
switch port r+1; server s is s{s}, 10.77.1.{s+1} at port 65+s.
"""

import atexit
import ctypes
import os
import shutil
import signal
import subprocess
import sys

from mininet.node import Host, Switch
from mininet.topo import Topo

# mn runs this file without saying where it is; the code knows.
HERE = os.path.dirname(os.path.abspath(sys._getframe().f_code.co_filename))
sys.path.insert(0, HERE)

from record import Record  # noqa: E402 (from the folder just named)

VETH = os.path.join(HERE, 'veth.py')

CPU_PORT = 510  # of packet-in and packet-out; xagg.p4 knows it
MAX_WORKERS = 64
MAX_SERVERS = 64
FIRST_SERVER_PORT = MAX_WORKERS + 1
FIRST_OTHER_PORT = FIRST_SERVER_PORT + MAX_SERVERS
SWITCH = 'x1'
SERVICE_IP = '10.77.255.254'
SERVICE_MAC = '02:78:61:00:ff:fe'
PREFIX_LENGTH = 16

# Seconds that a switch may take to end when it is asked to.
GRACE = 5

# What this process makes.
RECORD = Record()
atexit.register(RECORD.close)

# linux/prctl.h
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)


def die_with(parent):
    """Have the kernel kill this process when its parent ends, however."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)


def worker_address(rank):
    """Return IP and MAC of a worker."""
    return f'10.77.0.{rank + 1}', f'02:78:61:00:00:{rank + 1:02x}'


def server_address(index):
    """Return IP and MAC of an aggregation server."""
    return f'10.77.1.{index + 1}', f'02:78:61:00:01:{index + 1:02x}'


def other_address(index):
    """Return IP and MAC of a host that takes no part in the aggregation."""
    return f'10.77.2.{index + 1}', f'02:78:61:00:02:{index + 1:02x}'


class XAggTopo(Topo):
    """A star of workers, servers and other hosts around the switch x1."""

    def build(self, workers=4, servers=1, others=0):
        """Add hosts and links. Mininet passes numbers as it got them."""
        workers, servers, others = int(workers), int(servers), int(others)
        if (not 1 <= workers <= MAX_WORKERS or not 0 <= servers <= MAX_SERVERS
                or not 0 <= others <= MAX_SERVERS):
            raise ValueError(f'{workers} workers, {servers} servers and '
                             f'{others} others: want 1 to {MAX_WORKERS}, and '
                             f'0 to {MAX_SERVERS}')
        self.workers, self.servers, self.others = [], [], []
        switch = self.addSwitch(SWITCH)
        for rank in range(workers):
            self.workers.append(f'w{rank}')
            self._attach(switch, f'w{rank}', worker_address(rank), rank + 1)
        for index in range(servers):
            self.servers.append(f's{index}')
            self._attach(switch, f's{index}', server_address(index),
                         FIRST_SERVER_PORT + index)
        for index in range(others):
            self.others.append(f'h{index}')
            self._attach(switch, f'h{index}', other_address(index),
                         FIRST_OTHER_PORT + index)

    def _attach(self, switch, name, address, port):
        ip, mac = address
        self.addHost(name, ip=f'{ip}/{PREFIX_LENGTH}', mac=mac)
        self.addLink(name, switch, port2=port)

    def controller_config(self, switch, agents, listen, jobs=()):
        """Return the configuration of the star's controller.

        switch: address at which the switch answers P4Runtime
        agents: addresses of the servers' agents, in the servers' order
        listen: where the controller serves its API
        jobs: jobs to create at start, as in the configuration file
        """
        def member(name, address, port):
            ip, mac = address
            return {'name': name, 'ip': ip, 'mac': mac, 'port': port}

        return {
            'listen': listen,
            'switch': {'name': SWITCH, 'address': switch, 'device_id': 0,
                       'cpu_port': CPU_PORT},
            'service': {'ip': SERVICE_IP, 'mac': SERVICE_MAC},
            'hosts': [member(name, worker_address(rank), rank + 1)
                      for rank, name in enumerate(self.workers)]
            + [member(name, other_address(index), FIRST_OTHER_PORT + index)
               for index, name in enumerate(self.others)],
            'servers': [dict(member(name, server_address(index),
                                    FIRST_SERVER_PORT + index),
                             agent=agents[index])
                        for index, name in enumerate(self.servers)],
            'jobs': list(jobs),
        }


class PlainLinks:
    """A node that sends nothing by itself and whose links are plain wires.

    Its processes die with this one.
    """

    def __init__(self, *args, **params):
        super().__init__(*args, **params)
        # Before there are any interfaces: nothing about IPv6 is sent.
        for which in 'all', 'default':
            self.cmd(f'sysctl -qw net.ipv6.conf.{which}.disable_ipv6=1')

    def popen(self, *args, **kwargs):
        """Start a process in the node that does not outlive this one."""
        parent = os.getpid()
        return super().popen(*args, preexec_fn=lambda: die_with(parent),
                             **kwargs)

    def veth_options(self, port):
        """Return the options of veth.py for the interface at a port."""
        del port
        return []

    def addIntf(self, intf, port=None, moveIntfFn=None, **params):
        """Add an interface, and turn its offloads off."""
        kwargs = dict(params)
        if moveIntfFn is not None:
            kwargs['moveIntfFn'] = moveIntfFn
        super().addIntf(intf, port=port, **kwargs)
        if intf.name == 'lo':
            return
        out, err, code = self.pexec(
            [sys.executable, VETH, *self.veth_options(self.ports[intf]),
             intf.name])
        if code != 0:
            raise RuntimeError(f'{self.name}: {out}{err}'.strip())


class XAggHost(PlainLinks, Host):
    """A worker's or a server's host."""


class P4RuntimeSwitch(PlainLinks, Switch):
    """A switch process in a network namespace of its own.

    It answers P4Runtime at a unix socket, which is the same file for all
    nodes. Subclasses say how the process is called.
    """

    kind = None  # as the name is shown

    def __init__(self, name, binary=None, socket=None, **params):
        """Make the switch.

        binary: the program; by default the one on PATH
        socket: path of its P4Runtime socket; by default in a new folder
        """
        # Not in the root namespace: a switch must see its own links only.
        super().__init__(name, **dict(params, inNamespace=True))
        self.process = None
        self.binary = binary or shutil.which(self.program)
        if self.binary is None:
            raise RuntimeError(f'{self.program} is not on PATH')
        self.folder = RECORD.folder(f'xagg-{name}-')
        self.socket = socket or os.path.join(self.folder, 'p4runtime.sock')
        self.log = os.path.join(self.folder, 'switch.log')

    @property
    def address(self):
        """Return where the switch answers P4Runtime."""
        return f'unix:{self.socket}'

    def veth_options(self, port):
        """Let servers answer by XDP_TX: their peers need a program."""
        server = FIRST_SERVER_PORT <= port < FIRST_OTHER_PORT
        return ['--pass-xdp'] if server else []

    def command(self):
        """Return the command line; both programs take the same one."""
        ports = []
        for port, intf in sorted(self.intfs.items()):
            if intf.name != 'lo':
                ports += ['-i', f'{port}@{intf.name}']
        return [self.binary, *self.verb, '--no-p4', '--device-id', '0', *ports,
                '--', '--grpc-server-addr', self.address,
                '--cpu-port', str(CPU_PORT)]

    def start(self, controllers):
        """Start the process. It has no OpenFlow controllers."""
        del controllers
        with open(self.log, 'wb') as log:
            self.process = self.popen(self.command(), stdout=log,
                                      stderr=subprocess.STDOUT)

    def connected(self):
        """Return whether the switch answers."""
        return (self.process is not None and self.process.poll() is None
                and os.path.exists(self.socket))

    def stop(self, deleteIntfs=True):
        """End the process and remove its files."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(GRACE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None
        shutil.rmtree(self.folder, ignore_errors=True)
        super().stop(deleteIntfs)


class XAggEngine(P4RuntimeSwitch):
    """XAgg's embedded engine, as the process `xagg switch`."""

    kind = 'engine'
    program = 'xagg'
    verb = ['switch']


class SimpleSwitchGrpc(P4RuntimeSwitch):
    """The real simple_switch_grpc."""

    kind = 'simple_switch_grpc'
    program = 'simple_switch_grpc'
    verb = []


# For `mn --custom`.
topos = {'xagg': XAggTopo}
hosts = {'xagg': XAggHost}
switches = {'xagg_engine': XAggEngine, 'simple_switch_grpc': SimpleSwitchGrpc}
