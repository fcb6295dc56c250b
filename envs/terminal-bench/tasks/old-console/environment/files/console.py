"""The console. It asks the terminal, whatever standard input is."""

import getpass
import hashlib
import os
import sys

if not (sys.stdin.isatty() and sys.stdout.isatty()):
    sys.exit("this console needs a terminal")
if os.get_terminal_size().columns < 80:
    sys.exit("this console needs 80 columns")
operator = getpass.getpass("operator number: ")
if operator not in {line.split()[1] for line in open("/app/operators.txt")}:
    sys.exit("unknown operator")
hour = input("hour (0-23): ")
while True:
    choice = input("[l]ist units, [c]ode of a unit, [q]uit: ")
    if choice == "l":
        print("units: 3 7 9")
    elif choice == "c":
        unit = input("unit: ")
        print("code:", hashlib.sha256(f"{operator}/{hour}/{unit}/console".encode()).hexdigest()[:12])
    elif choice == "q":
        break
