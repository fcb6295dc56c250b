"""Carries connections into a network namespace, run by path in there: ``python forward.py LISTENING_FD PORT``.

The socket that listens was made outside, and stays there.
"""

import asyncio
import socket
import sys


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(65536):
        writer.write(piece)
        await writer.drain()
    writer.write_eof()


async def _join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        theirs, to_them = await asyncio.open_connection("127.0.0.1", int(sys.argv[2]))
    except OSError:
        writer.transport.abort()
        return
    try:
        await asyncio.gather(_carry(reader, to_them), _carry(theirs, writer))
    except OSError:  # one side is gone, and the other is told
        writer.transport.abort()
    finally:
        to_them.transport.abort()
        writer.close()


async def main() -> None:
    server = await asyncio.start_server(_join, sock=socket.socket(fileno=int(sys.argv[1])))
    await server.serve_forever()


asyncio.run(main())
