"""A service that keeps orders, and gives them out in pages.

GET /orders?after=ID answers {"orders": [...], "next": ID or null}: at most five orders after that ID. Without
``after``, the first. Every third request is answered with 503, and is to be made again.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class Orders(BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        Orders.asked += 1
        parts = urlsplit(self.path)
        if parts.path != "/orders":
            return self.answer(404, {"error": "there is nothing here"})
        if Orders.asked % 3 == 0:
            return self.answer(503, {"error": "busy"})
        after = int(parse_qs(parts.query).get("after", ["0"])[0])
        rest = [order for order in ORDERS if order["id"] > after]
        return self.answer(200, {"orders": rest[:5], "next": rest[4]["id"] if len(rest) > 5 else None})

    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


ORDERS = sorted(json.load(open(sys.argv[1])), key=lambda order: order["id"])
server = ThreadingHTTPServer(("127.0.0.1", 0), Orders)
with open(sys.argv[2] + ".new", "w") as file:
    file.write(str(server.server_address[1]))
os.replace(sys.argv[2] + ".new", sys.argv[2])
server.serve_forever()
