import csv
import sys

WANTED = [
    ["id", "date", "account", "cents"],
    ["1", "2026-01-03", "food", "2099"],
    ["2", "2026-01-05", "rent", "90000"],
    ["7", "2026-01-19", "books", "1500"],
    ["9", "2026-01-08", "travel", "-500"],
    ["10", "2026-01-09", "food", "2350"],
    ["13", "2026-01-12", "food, other", "420"],
    ["31", "2026-02-01", "rent", "90000"],
]
try:
    with open("/app/ledger.csv", newline="") as file:
        rows = [row for row in csv.reader(file) if row]
    with open("/app/total.txt") as file:
        total = file.read().strip()
except OSError as exc:
    sys.exit(str(exc))
if rows != WANTED:
    sys.exit(f"the ledger is wrong: {rows}")
sys.exit(0 if total == str(sum(int(row[3]) for row in WANTED[1:])) else f"the total is wrong: {total}")
