"""Counts in a copy of the log of its own: the agent's may have been changed."""

import collections
import json
import sys

rows = []
for line in open("/tests/access.log"):
    parts = line.split()
    if len(parts) == 10:
        rows.append((parts[0], parts[6], int(parts[8]), int(parts[9])))
addresses = collections.Counter(row[0] for row in rows)
most = max(addresses.values())
wanted = {
    "requests": len(rows),
    "errors": sum(row[2] >= 500 for row in rows),
    "bytes": sum(row[3] for row in rows),
    "busiest": sorted(address for address, count in addresses.items() if count == most)[0],
    "paths": dict(collections.Counter(row[1] for row in rows)),
}
try:
    found = json.load(open("/app/report.json"))
except (OSError, ValueError) as exc:
    sys.exit(f"there is no report: {exc}")
sys.exit(0 if found == wanted else f"the report is wrong: {found}")
