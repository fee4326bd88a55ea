"""Two processes: one owns memory, the other writes an array into it and rings its signal word."""

import subprocess
import sys

import numpy as np

import tensorwire as tw

if len(sys.argv) == 1:  # the owner: allocates, starts the writer, waits for the signal
    with tw.Node("owner") as node:
        region = node.allocate(8 + 80, name="greeting")
        writer = subprocess.Popen([sys.executable, __file__, node.address])
        region.word(0).wait_until(1, timeout_s=30)
        print("owner sees", region[8:].array("float64").tolist())
        sys.exit(writer.wait())
else:
    with tw.Node("writer") as node:
        peer = node.connect(sys.argv[1])
        remote = peer.region("greeting")
        remote[8:].write(np.arange(10.0), signal=(remote.word(0), 1)).wait()
        print("writer used", peer.path)
