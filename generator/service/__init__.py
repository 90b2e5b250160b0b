"""The generator as a service on Arrow Flight: one loaded model that generates units on request.

``kvdrift serve`` is the server and ``kvdrift run --endpoint`` the client. Studies and stores stay with the client:

- The action ``identity`` describes the served model. A client stops if its study requests another model.
- ``do_get`` takes a ticket with one document and its pending units, and streams their events unit by unit. A batch
  without rows reports every second that the service is alive.
- The service refuses every other Flight call.

Events are a function of the request alone, so another endpoint can repeat work that was lost.
"""

from __future__ import annotations

import os

# gRPC logs to standard error on both sides; the errors that it raises have the same content.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
