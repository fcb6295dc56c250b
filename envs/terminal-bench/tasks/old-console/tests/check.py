import hashlib
import sys

try:
    with open("/app/code.txt") as file:
        found = file.read().strip()
except OSError as exc:
    sys.exit(str(exc))
wanted = hashlib.sha256(b"4471/14/7/console").hexdigest()[:12]
sys.exit(0 if found == wanted else f"{found!r} is not the code")
