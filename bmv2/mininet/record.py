"""A record of the folders that this process makes, for those who come after.

It has the form of the records of XAgg's other labs (package lab/netns) and
lies beside them: one file in /run/xagg, which names the process and what it
makes, before it makes it. The process holds a lock on the file, which the
kernel releases when the process ends, however it ends. Then the next run of
whatever XAgg lab, or `xagg doctor --fix`, removes what the record lists.
Nothing is ever found by the pattern of a name.
"""

import fcntl
import json
import os
import secrets
import shutil
import tempfile

RUN_DIR = '/run/xagg'
SUFFIX = '.lab'


class Record:
    """The record of one process; its file is made with the first folder."""

    def __init__(self, run_dir=RUN_DIR):
        self.run_dir = run_dir
        self.path = None
        self.file = None
        self.folders = []

    def folder(self, prefix):
        """Make a folder that is removed with the record; return its path."""
        if self.file is None:
            self._open()
        path = os.path.join(tempfile.gettempdir(),
                            prefix + secrets.token_hex(8))
        if os.path.lexists(path):
            # What is somebody else's must not get into the record.
            raise FileExistsError(f'{path} exists')
        self._add({'path': path})
        os.mkdir(path, 0o700)
        self.folders.append(path)
        return path

    def close(self):
        """Remove the folders, then the record."""
        if self.file is None:
            return
        for path in self.folders:
            shutil.rmtree(path, ignore_errors=True)
        if not any(map(os.path.lexists, self.folders)):
            os.unlink(self.path)
        self.file.close()
        self.file, self.folders = None, []

    def _open(self):
        os.makedirs(self.run_dir, exist_ok=True)
        while True:
            self.path = os.path.join(self.run_dir,
                                     secrets.token_hex(4) + SUFFIX)
            # pylint: disable=consider-using-with
            file = open(self.path, 'x', encoding='utf-8')
            # Between the two calls a sweep may have seen a record that nobody
            # held, and removed it: then once more.
            if lock(file):
                break
            file.close()
        self.file = file
        self._add({'owner': {'pid': os.getpid(), 'start': start_of('self')}})

    def _add(self, entry):
        self.file.write(json.dumps(entry) + '\n')
        self.file.flush()


def start_of(pid):
    """Return when a process started, in clock ticks since boot."""
    with open(f'/proc/{pid}/stat', 'rb') as file:
        # The second field, in parentheses, may hold anything.
        return int(file.read().rpartition(b')')[2].split()[19])


def lock(file):
    """Take a record; return whether nobody has it and it is still there."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(file.fileno()).st_nlink > 0


def sweep(run_dir=RUN_DIR):
    """Remove the folders that dead processes have recorded.

    Records that list more than folders are left to `xagg demo` and `xagg
    doctor --fix`, which know how to remove the rest. Returns what was removed.
    """
    removed = []
    try:
        names = sorted(os.listdir(run_dir))
    except FileNotFoundError:
        return removed
    for name in names:
        if not name.endswith(SUFFIX):
            continue
        path = os.path.join(run_dir, name)
        try:
            with open(path, 'r+', encoding='utf-8') as file:
                if not lock(file):
                    continue
                folders = folders_of(file.read())
                if folders is None:
                    continue
                for folder in folders:
                    if os.path.lexists(folder):
                        shutil.rmtree(folder)
                        removed.append(folder)
                os.unlink(path)
        except FileNotFoundError:
            continue  # its owner was faster
    return removed


def folders_of(text):
    """Return the folders that a record lists; None if it lists more.

    A last line that was not written completely stands for something that was
    not made.
    """
    folders = []
    for line in text.splitlines(keepends=True):
        if not line.endswith('\n'):
            break
        try:
            entry = json.loads(line)
        except ValueError:
            return None
        if not isinstance(entry, dict) or set(entry) - {'owner', 'path'}:
            return None
        if 'path' in entry:
            folders.append(entry['path'])
    return folders
