"""pvrdma-mux.py SOCKET: acknowledges the GIDs that QEMU's pvrdma registers, in place of QEMU's rdmacm-mux, which needs the kernel's
RDMA. The connection manager's datagrams (MADs) end here.

A message is QEMU's struct RdmaCmMuxMsg of 360 bytes, whose first words are its type (0 request, 1 response) and its operation
(0 register, 1 unregister, 2 MAD), and whose word at 24 is the error."""

import socket
import struct
import sys

SIZE = 360

server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
server.bind(sys.argv[1])
server.listen()
qemu, _ = server.accept()
with qemu.makefile("rwb", buffering=0) as file:
    data = b""
    while part := file.read(SIZE - len(data)):
        data += part
        if len(data) == SIZE:
            if data[:4] == struct.pack("=I", 0):
                file.write(struct.pack("=I", 1) + data[4:24] + struct.pack("=I", 0) + data[28:])
            data = b""
