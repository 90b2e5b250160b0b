"""Count the replicates that wait for positions in the folder ``pieces``: they are whole nowhere, and in no estimate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdrift.log.waiting import Waiting, count_waiting
from kvdrift.schema.errors import DamagedStoreError
from kvdrift.verification.files import Fault, Verified, number_of

if TYPE_CHECKING:
    from kvdrift.log.store import Store


def check_waiting(store: Store) -> Verified:
    """Count waiting replicates, with a note for each study and model; a file that cannot be read is a fault."""
    waiting, faults = dict[tuple[str, str], Waiting](), list[Fault]()
    try:
        waiting = count_waiting(store)
    except DamagedStoreError as error:
        faults.append(Fault("pieces", str(error)))
    notes = [f"study {study}, model {model}: {count} wait" for (study, model), count in waiting.items()]
    total = number_of(sum(count.replicates for count in waiting.values()), "replicate")
    return Verified("pieces", total, "that lack positions and are in no estimate", tuple(faults), tuple(notes))
