"""The engine process with an arithmetic model that nothing makes go wrong: for random requests."""

import socket
import sys

from jaxserve.server import engine_process
from tests.cli import fakes

if __name__ == "__main__":
    sys.exit(engine_process.run(socket.socket(fileno=int(sys.argv[1])), fakes.assemble))
