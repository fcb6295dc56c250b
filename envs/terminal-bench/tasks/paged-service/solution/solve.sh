#!/bin/bash
cat > /app/client.py <<'END'
import json
import sys
import urllib.error
import urllib.request


def get(url):
    while True:
        try:
            with urllib.request.urlopen(url) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as exc:
            if exc.code != 503:
                raise


total, after = 0, 0
while after is not None:
    page = get(f"{sys.argv[1]}/orders?after={after}")
    total += sum(order["amount"] for order in page["orders"] if order["status"] == "paid")
    after = page["next"]
print(total)
END
cd /app
python3 service.py orders.json /tmp/port &
until [ -s /tmp/port ]; do sleep 0.1; done
[ "$(python3 client.py "http://127.0.0.1:$(cat /tmp/port)")" = 42 ]
