#!/bin/bash
cd /app && python3 - <<'END'
import collections
import json
import re

LINE = re.compile(r'(\S+) \S+ \S+ \[[^]]+\] "\S+ (\S+) [^"]+" (\d{3}) (\d+)')
rows = [found.groups() for found in map(LINE.fullmatch, open("access.log").read().splitlines()) if found]
addresses = collections.Counter(row[0] for row in rows)
report = {
    "requests": len(rows),
    "errors": sum(int(row[2]) >= 500 for row in rows),
    "bytes": sum(int(row[3]) for row in rows),
    "busiest": min(addresses, key=lambda address: (-addresses[address], address)),
    "paths": collections.Counter(row[1] for row in rows),
}
json.dump(report, open("report.json", "w"))
END
