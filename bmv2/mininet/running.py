"""How long what runs in Mininet runs: waiting, ending, and interrupts."""

import signal
import subprocess
import time

INTERRUPTED = 128 + signal.SIGINT  # exit code, as shells have it


class LabError(Exception):
    """Something is missing or went wrong; the message says what."""


class Interrupt:
    """The signals that end a run.

    They are only noted, and seen where it waits: an exception that comes
    while Python forks is dropped.
    """

    noted = False

    @classmethod
    def note(cls, *_):
        """Note a signal."""
        cls.noted = True


def notice():
    """Note the signals from now on.

    Ended by one, a run still cleans up; killed, the next one does.
    """
    for number in signal.SIGINT, signal.SIGTERM:
        signal.signal(number, Interrupt.note)


def wait_for(what, condition, seconds=60):
    """Wait until condition() is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if Interrupt.noted:
            raise KeyboardInterrupt
        if time.monotonic() > deadline:
            raise LabError(f'{what}: not within {seconds} s')
        time.sleep(0.05)


def end(process, grace=5):
    """End a process that may have ended."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tail(path, lines=10):
    """Return the end of a log."""
    with open(path, encoding='utf-8', errors='replace') as file:
        return ''.join(file.readlines()[-lines:])
