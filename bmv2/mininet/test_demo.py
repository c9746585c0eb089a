"""Tests of the demo's own sums and of the topology; they start nothing."""

import array
import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest

import demo
import record
import running
import veth
from xagg_mininet import XAggTopo


def npy(values, descr='<f4', shape=None, magic=b'\x93NUMPY'):
    """Return the bytes of a .npy file."""
    header = repr({'descr': descr, 'fortran_order': False,
                   'shape': (len(values),) if shape is None else shape})
    header = header.ljust(117) + '\n'
    return (struct.pack('<6sBBH', magic, 1, 0, len(header)) + header.encode()
            + array.array('f', values).tobytes())


class GradientsTest(unittest.TestCase):
    """Reading of gradients."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def write(self, name, data):
        """Write a file; return its path."""
        path = os.path.join(self.folder, name)
        with open(path, 'wb') as file:
            file.write(data)
        return path

    def test_steps(self):
        """Files are sorted into steps and ranks."""
        for step in 1, 2:
            for rank in 0, 1:
                self.write(f'step{step}-rank{rank}.npy', npy([step, rank]))
        steps = demo.read_steps(self.folder, 2)
        self.assertEqual([[list(v) for v in step] for step in steps],
                         [[[1, 0], [1, 1]], [[2, 0], [2, 1]]])

    def test_missing_rank(self):
        """Every rank has as many files as the first."""
        self.write('step1-rank0.npy', npy([1]))
        with self.assertRaisesRegex(running.LabError, '0 files of rank 1'):
            demo.read_steps(self.folder, 2)

    def test_bad_files(self):
        """Other types, shapes and formats are refused."""
        for name, data in (('dtype', npy([1], descr='<f8')),
                           ('shape', npy([1, 2], shape=(1, 2))),
                           ('short', npy([1, 2], shape=(3,))),
                           ('magic', npy([1], magic=b'NOTNPY'))):
            with self.subTest(name), self.assertRaises(running.LabError):
                demo.read_npy(self.write(name, data))


class OracleTest(unittest.TestCase):
    """The plain sums."""

    def test_half_to_even(self):
        """Values are rounded half to even before they are added."""
        ranks = [array.array('f', [0.5, 1.5, -2.5, 0.25]),
                 array.array('f', [0.5, 0.5, -0.5, 0.25])]
        oracle = demo.Oracle([ranks], 1)
        self.assertEqual(list(oracle.sums(0, 0)), [0, 2, -2, 0])

    def test_clipping_carries_over(self):
        """What is clipped is added to the same lane of the next vector."""
        big = array.array('f', [2.0, 1.0])
        zero = array.array('f', [0.0, 0.0])
        oracle = demo.Oracle([[big, zero]], 2)
        limit = demo.INT32_MAX // 2
        self.assertEqual(list(oracle.sums(0, 29)), [limit, 2**29])
        # 2^30 - limit is 1, which float32 holds exactly after scaling back.
        self.assertEqual(oracle.residual[0][2], {0: 2.0**-29})
        self.assertEqual(list(oracle.sums(1, 20)), [2**21, 2**20])


class CompareTest(unittest.TestCase):
    """Comparison of what workers received."""

    def check(self, change=None, lines=None):
        """Compare two workers' sums of one all-reduce."""
        steps = [[array.array('f', [1, 2]), array.array('f', [3, 4])]]
        lines = lines or [[{'index': 0, 'exponent': 1}] for _ in range(2)]
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(2):
                sums = array.array('i', [8, 12])
                if rank == change:
                    sums[1] += 1
                name = f'round000-rank{rank}.i32'
                with open(os.path.join(folder, name), 'wb') as file:
                    file.write(sums.tobytes())
            return demo.compare(lines, folder, demo.Oracle(steps, 1), 1)

    def test_equal(self):
        """Equal integers are exact."""
        self.assertIsNone(self.check())

    def test_one_lane_of_one_rank(self):
        """One changed lane is found."""
        self.assertIn('rank 1', self.check(change=1))

    def test_reports(self):
        """Missing all-reduces and odd exponents are found."""
        one = [{'index': 0, 'exponent': 1}]
        self.assertIn('rank 1 reports 0', self.check(lines=[one, []]))
        self.assertIn('exponents', self.check(
            lines=[one, [{'index': 0, 'exponent': 2}]]))


class TopologyTest(unittest.TestCase):
    """The star."""

    def test_addresses(self):
        """Hosts, ports and the controller's configuration belong together."""
        topo = XAggTopo(workers=2, servers=1)
        config = topo.controller_config('unix:/s', ['unix:/a'], 'unix:/c')
        self.assertEqual(config['hosts'][1], {
            'name': 'w1', 'ip': '10.77.0.2', 'mac': '02:78:61:00:00:02',
            'port': 2})
        self.assertEqual(config['servers'], [{
            'name': 's0', 'ip': '10.77.1.1', 'mac': '02:78:61:00:01:01',
            'port': 65, 'agent': 'unix:/a'}])
        for host in config['hosts'] + config['servers']:
            self.assertEqual(topo.nodeInfo(host['name'])['ip'],
                             host['ip'] + '/16')
            self.assertEqual(topo.port('x1', host['name'])[0], host['port'])

    def test_others(self):
        """Hosts beside workers and servers are the controller's too."""
        topo = XAggTopo(workers=1, servers=1, others=1)
        config = topo.controller_config('unix:/s', ['unix:/a'], 'unix:/c')
        self.assertEqual(config['hosts'][1], {
            'name': 'h0', 'ip': '10.77.2.1', 'mac': '02:78:61:00:02:01',
            'port': 129})
        self.assertEqual(topo.port('x1', 'h0')[0], 129)

    def test_limits(self):
        """A star has 1 to 64 workers."""
        for workers in 0, 65:
            with self.subTest(workers), self.assertRaises(ValueError):
                XAggTopo(workers=workers)


class RecordTest(unittest.TestCase):
    """What a process made is removed by it, or by the next."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.run_dir = os.path.join(folder.name, 'run')

    def records(self):
        """Return the names of the records."""
        return [name for name in os.listdir(self.run_dir)
                if name.endswith(record.SUFFIX)]

    def killed(self):
        """Let a process make a folder and die; return the folder."""
        code = ('import os, record, sys\n'
                'folder = record.Record(sys.argv[1]).folder("xagg-test-")\n'
                'open(os.path.join(folder, "file"), "w").close()\n'
                'print(folder, flush=True)\n'
                'os.kill(os.getpid(), 9)\n')
        out = subprocess.run([sys.executable, '-B', '-c', code, self.run_dir],
                             stdout=subprocess.PIPE, check=False, text=True)
        self.assertEqual(out.returncode, -9)
        return out.stdout.strip()

    def test_close(self):
        """Folders and record go with their owner."""
        mine = record.Record(self.run_dir)
        folders = [mine.folder('xagg-test-') for _ in range(2)]
        with open(os.path.join(self.run_dir, self.records()[0]),
                  encoding='utf-8') as file:
            lines = [json.loads(line) for line in file]
        self.assertEqual(lines[0]['owner'], {
            'pid': os.getpid(), 'start': record.start_of(os.getpid())})
        self.assertEqual([line['path'] for line in lines[1:]], folders)
        mine.close()
        self.assertFalse(any(map(os.path.lexists, folders)))
        self.assertEqual(self.records(), [])

    def test_sweep(self):
        """Only what a dead process has recorded is swept."""
        self.assertEqual(record.sweep(self.run_dir), [])
        mine = record.Record(self.run_dir)
        self.addCleanup(mine.close)
        living = mine.folder('xagg-test-')
        dead = self.killed()
        self.assertTrue(os.path.isfile(os.path.join(dead, 'file')))
        self.assertEqual(record.sweep(self.run_dir), [dead])
        self.assertFalse(os.path.lexists(dead))
        self.assertTrue(os.path.isdir(living))
        self.assertEqual(len(self.records()), 1)
        self.assertEqual(record.sweep(self.run_dir), [])

    def test_others(self):
        """A record that lists more than folders, or is odd, stays."""
        os.mkdir(self.run_dir)
        for name, text in {'lab': '{"netns": "xagg-a-w0"}\n',
                           'odd': 'no JSON\n'}.items():
            path = os.path.join(self.run_dir, name + record.SUFFIX)
            with open(path, 'w', encoding='utf-8') as file:
                file.write('{"path": "/nowhere"}\n' + text)
        self.assertEqual(record.sweep(self.run_dir), [])
        self.assertEqual(len(self.records()), 2)

    def test_incomplete_line(self):
        """What was not recorded completely was not made."""
        self.assertEqual(record.folders_of('{"path": "/a"}\n{"path": "/'),
                         ['/a'])


class VethTest(unittest.TestCase):
    """Encoding for netlink."""

    def test_attribute(self):
        """An attribute is padded to four bytes, its length is not."""
        self.assertEqual(veth.attribute(3, b'\1'),
                         struct.pack('HH', 5, 3) + b'\1\0\0\0')


if __name__ == '__main__':
    unittest.main()
