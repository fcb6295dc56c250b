#!/bin/bash
cd /app && python3 - <<'END'
import os
import pty
import re
import fcntl
import struct
import termios

pid, terminal = pty.fork()
if pid == 0:
    while os.get_terminal_size().columns < 80:
        pass
    os.execvp("python3", ["python3", "/app/console.py"])
fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
said = b""
for prompt, answer in ((b"number: ", b"4471"), (b"(0-23): ", b"14"), (b"uit: ", b"c"), (b"unit: ", b"7"), (b"uit: ", b"q")):
    start = len(said)
    while prompt not in said[start:]:
        said += os.read(terminal, 1024)
    os.write(terminal, answer + b"\n")
open("code.txt", "w").write(re.search(rb"code: (\w+)", said)[1].decode() + "\n")
END
