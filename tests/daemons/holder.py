"""The first process of the namespaces that daemons are started in, run by path: ``python holder.py USERS``.

It takes in orphans, and ends as soon as nobody holds the file USERS any more, however they ended. With it, the kernel
ends every process, mount and network in there.
"""

import fcntl
import os
import signal
import subprocess
import sys
import threading


def _until_nobody_is_left(users: str) -> None:
    with open(users) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os._exit(0)


def main() -> None:
    # What daemons keep in /run they keep for themselves.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    threading.Thread(target=_until_nobody_is_left, args=(sys.argv[1],), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            signal.sigwait({signal.SIGCHLD})


if __name__ == "__main__":
    main()
