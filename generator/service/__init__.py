"""The generator as a service on Arrow Flight: one model, loaded once, that generates units for whoever asks.

``kvdrift serve`` is the server, ``kvdrift run --endpoint`` the client, and studies and stores are the client's alone:

- a client asks the action ``identity`` what is served, and refuses what its study does not ask for;
- ``do_get`` takes a ticket with one document and its pending units, and streams their events unit by unit; batches
  without rows say, every second, that the service is alive;
- whatever else a Flight client can ask for is refused.

Events depend on what is asked for and not on who answers, so work that is lost with one endpoint is done by another.
"""

from __future__ import annotations

import os

# gRPC writes lines of its own to standard error, on both sides; what there is to say is in the errors that it raises.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
