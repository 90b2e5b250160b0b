"""A service whose GPU computes nothing more, beside one that is well: it ends, and all work is done."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fixtures.common_actions import CONTROL, HALF_RECENT
from fixtures.random_models import random_document, save_random_model
from fixtures.small_study import write_study
from fixtures.study_files import load_study

from generator.generation import PendingUnit, generate_units
from generator.service.client import ServiceAddress
from generator.service.dispatch import EndpointPool
from generator.service.identity import identity_of
from generator.service.server import GenerationService
from generator.transformer.loading import load_model
from generator.transformer.model import LoadedModel
from schema.errors import OperationError


@dataclass(frozen=True)
class Lost(LoadedModel):
    """A model on a GPU whose context is broken."""

    def prefill(self, *_: object) -> NoReturn:
        message = "CUDA error: an illegal memory access was encountered"
        raise RuntimeError(message)


class Service:
    """A service in a thread, which closes as ``kvdrift serve`` does; ``ended`` is what has ended it."""

    def __init__(self, model: LoadedModel) -> None:
        self.service = GenerationService(
            model, identity_of(model, None), "grpc://127.0.0.1:0", token=None, certificate=None, max_request_bytes=2**20
        )
        self.address = ServiceAddress(f"grpc://127.0.0.1:{self.service.port}")
        self.ended: OperationError | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.service.run()
        except OperationError as error:
            self.ended = error
        self.service.close()


def test_work_of_a_service_whose_gpu_is_lost_is_done_elsewhere(tmp_path: Path) -> None:
    folder = save_random_model(tmp_path / "model", "llama")
    model = load_model(str(folder))
    changes = ('id = "kvdrift/tiny"', f'id = "{folder}"'), ("horizon = 12", "horizon = 4")
    study = load_study(write_study(tmp_path, *changes))
    pending = [PendingUnit(HALF_RECENT, 0, 2), PendingUnit(CONTROL, 0, 2)]
    work = [(random_document(f"d{number}", 40), pending) for number in range(6)]
    lost, well = Service(Lost(**vars(model))), Service(model)
    said: list[str] = []
    pool = EndpointPool([lost.address, well.address], [study], said.append, pause=0.05)
    try:
        pool.check()
        made = {units[0].record["doc"]: units for units in pool.generate(study, work)}
        lost.thread.join(20)
    finally:
        well.service.close()
    assert str(lost.ended).startswith("device 'cpu' computes nothing more: CUDA error: an illegal memory access")
    assert "illegal memory access was encountered; its work will be repeated" in said[0]
    for document, _ in work:
        expected = generate_units(model, study.name, document, pending, 4, study.study.seed)
        for one, other in zip(made[document.doc], expected, strict=True):
            assert one.events.equals(other.events)
