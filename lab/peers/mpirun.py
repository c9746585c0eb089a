"""Open MPI's mpirun, in which each rank is a process that was started alone.

    mpirun.py start FOLDER RANK

is such a process, on a host of its own that shares everything with the others
but the network. That of rank 0 becomes mpirun, and what mpirun wants to run on
another host by a remote shell, which is this script too,

    mpirun.py shell FOLDER ADDRESS COMMAND...

is handed to the process that waits for it there and becomes Open MPI's daemon.
Each daemon starts mpi.py, which writes to the output that the daemon has: that
of the process that was started.
"""

import ctypes
import json
import os
import socket
import sys

import loop

# linux/sched.h
CLONE_NEWUTS = 0x04000000

MPIRUN = 'mpirun.openmpi'


def script(name):
    """Return the command of a script beside this one."""
    here = os.path.dirname(os.path.abspath(__file__))
    return [sys.executable, '-B', os.path.join(here, name)]


def pipe(folder, address):
    """Return the named pipe at which a host waits for a command."""
    return os.path.join(folder, f'shell-{address}')


def own_host_name(name):
    """Have a host name of this process's own.

    Open MPI takes processes for neighbours whose hosts have the same name.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUTS) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f'get a host name of its own: {os.strerror(code)}')
    socket.sethostname(name)


def start(folder, rank):
    """Become mpirun or one of its daemons."""
    with open(os.path.join(folder, 'plan.json'), encoding='utf-8') as file:
        plan = json.load(file)
    addresses, network = plan['addresses'], plan['network']
    own_host_name(f'rank{rank}')
    if rank > 0:
        # Both ends wait for each other.
        with open(pipe(folder, addresses[rank]), encoding='utf-8') as file:
            command = file.read()
        os.execv('/bin/sh', ['sh', '-c', 'exec ' + command])
    options = {
        'plm': 'rsh',
        'plm_rsh_agent': ' '.join([*script('mpirun.py'), 'shell', folder]),
        'plm_rsh_no_tree_spawn': '1',
        # Nothing but TCP, through the switch.
        'pml': 'ob1',
        'btl': 'tcp,self',
        'btl_tcp_if_include': network,
        'oob_tcp_if_include': network,
        'orte_tmpdir_base': folder,
        'hwloc_base_binding_policy': 'none',
        'mpi_yield_when_idle': '1',
    }
    command = [MPIRUN, '--allow-run-as-root', '--leave-session-attached',
               '-np', str(len(addresses)),
               '--host', ','.join(f'{address}:1' for address in addresses)]
    for name, value in options.items():
        command += ['--mca', name, value]
    os.execvp(MPIRUN, [*command, *script('mpi.py'), folder])


def shell(folder, address, command):
    """Have a host run a command; as with ssh, it is a shell's text."""
    loop.die_with_parent()  # it may wait for long
    with open(pipe(folder, address), 'w', encoding='utf-8') as file:
        file.write(' '.join(command))


def main():
    """Run the command line."""
    role, folder, which, *rest = sys.argv[1:]
    if role == 'start':
        start(os.path.abspath(folder), int(which))
    else:
        shell(folder, which, rest)


if __name__ == '__main__':
    main()
