#!/usr/bin/python3
"""Make an interface of this network namespace behave as a wire's end.

    veth.py [--pass-xdp] INTERFACE

turns its offloads off, so that frames carry complete checksums and none is
longer than the MTU. With --pass-xdp it also attaches, natively, an XDP program
that passes every frame: a veth delivers what its peer's XDP program transmits
(XDP_TX) only if it has a native program itself.

Neither needs a program that a machine may lack: offloads go by ioctl, the XDP
program by bpf(2) and rtnetlink.
"""

import argparse
import ctypes
import fcntl
import os
import platform
import socket
import struct

SIOCETHTOOL = 0x8946

# linux/ethtool.h
OFFLOADS = {
    'rx': 0x15,   # ETHTOOL_SRXCSUM
    'tx': 0x17,   # ETHTOOL_STXCSUM
    'sg': 0x19,   # ETHTOOL_SSG
    'tso': 0x1f,  # ETHTOOL_STSO
    'gso': 0x24,  # ETHTOOL_SGSO
    'gro': 0x2c,  # ETHTOOL_SGRO
}


def offloads_off(name):
    """Turn the interface's offloads off."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for feature, command in OFFLOADS.items():
            value = ctypes.create_string_buffer(struct.pack('II', command, 0))
            ifreq = struct.pack('16sP16x', name.encode(),
                                ctypes.addressof(value))
            try:
                fcntl.ioctl(sock, SIOCETHTOOL, ifreq)
            except OSError as err:
                raise OSError(err.errno, f'turn off {feature} of {name}: '
                              f'{err.strerror}') from err


# linux/bpf.h
BPF_PROG_LOAD = 5
BPF_PROG_TYPE_XDP = 6
SYS_BPF = {'x86_64': 321, 'aarch64': 280, 'riscv64': 280}

# linux/rtnetlink.h, linux/if_link.h
RTM_SETLINK = 19
NLM_F_REQUEST_ACK = 1 | 4
NLMSG_ERROR = 2
NLA_F_NESTED = 0x8000
IFLA_XDP = 43
IFLA_XDP_FD = 1
IFLA_XDP_FLAGS = 3
XDP_FLAGS_DRV_MODE = 1 << 2


def load_pass():
    """Load the XDP program `return XDP_PASS`; return its descriptor."""
    program = struct.pack('<BBhi BBhi',
                          0xb7, 0, 0, 2,  # r0 = XDP_PASS
                          0x95, 0, 0, 0)  # exit
    code = ctypes.create_string_buffer(program, len(program))
    license_ = ctypes.create_string_buffer(b'Apache-2.0')
    attr = ctypes.create_string_buffer(
        struct.pack('IIQQ', BPF_PROG_TYPE_XDP, len(program) // 8,
                    ctypes.addressof(code), ctypes.addressof(license_)), 128)
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(SYS_BPF[platform.machine()], BPF_PROG_LOAD,
                      ctypes.byref(attr), len(attr))
    if fd < 0:
        raise OSError(ctypes.get_errno(), 'load the passing XDP program: '
                      + os.strerror(ctypes.get_errno()))
    return fd


def attribute(kind, payload):
    """Encode a netlink attribute."""
    size = 4 + len(payload)
    return struct.pack('HH', size, kind) + payload + bytes(-size % 4)


def pass_xdp(name):
    """Attach the passing program natively; it stays with the interface."""
    fd = load_pass()
    try:
        xdp = (attribute(IFLA_XDP_FD, struct.pack('i', fd))
               + attribute(IFLA_XDP_FLAGS,
                           struct.pack('I', XDP_FLAGS_DRV_MODE)))
        body = struct.pack('BxHiII', socket.AF_UNSPEC, 0,
                           socket.if_nametoindex(name), 0, 0)
        body += attribute(IFLA_XDP | NLA_F_NESTED, xdp)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW,
                           socket.NETLINK_ROUTE) as sock:
            sock.send(struct.pack('IHHII', 16 + len(body), RTM_SETLINK,
                                  NLM_F_REQUEST_ACK, 1, 0) + body)
            answer = sock.recv(4096)
    finally:
        os.close(fd)
    _, kind, _, _, _, code = struct.unpack_from('IHHIIi', answer)
    if kind != NLMSG_ERROR or code != 0:
        raise OSError(-code, f'attach the passing XDP program to {name}: '
                      + os.strerror(-code))


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--pass-xdp', action='store_true',
                        help='attach an XDP program that passes every frame')
    parser.add_argument('interface')
    args = parser.parse_args()
    try:
        offloads_off(args.interface)
        if args.pass_xdp:
            pass_xdp(args.interface)
            # A veth that gets an XDP program turns GRO on by itself.
            offloads_off(args.interface)
    except OSError as err:
        parser.exit(1, f'veth.py: {err}\n')


if __name__ == '__main__':
    main()
