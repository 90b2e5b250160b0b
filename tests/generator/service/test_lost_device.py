"""A service whose GPU can compute nothing more ends, and the run says why."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fixtures.common_actions import CONTROL, HALF_RECENT
from fixtures.random_models import random_document, save_random_model
from fixtures.refusals import refused
from fixtures.small_study import write_study
from fixtures.study_files import load_study

from generator.generation import PendingUnit
from generator.service.client import ServiceAddress
from generator.service.remote import RemoteGenerator
from generator.service.served import identity_of
from generator.service.server import GenerationService
from generator.transformer.loading import load_model
from generator.transformer.model import LoadedModel
from schema.errors import NobodyLeftError, OperationError


@dataclass(frozen=True)
class Lost(LoadedModel):
    """A model on a GPU whose context is broken."""

    def prefill(self, *_: object) -> NoReturn:
        message = "CUDA error: an illegal memory access was encountered"
        raise RuntimeError(message)


class Service:
    """A service in a thread, which closes as ``kvdrift serve`` does; ``ended`` is the error that ended it."""

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


def test_a_service_whose_gpu_is_lost_ends_and_says_why(tmp_path: Path) -> None:
    folder = save_random_model(tmp_path / "model", "llama")
    model = load_model(str(folder))
    changes = ('id = "kvdrift/tiny"', f'id = "{folder}"'), ("horizon = 12", "horizon = 4")
    study = load_study(write_study(tmp_path, *changes))
    work = [(random_document("d", 40), [PendingUnit(HALF_RECENT, 0, 2), PendingUnit(CONTROL, 0, 2)])]
    lost = Service(Lost(**vars(model)))
    said: list[str] = []
    remote = RemoteGenerator(lost.address, [study], said.append, pause=0.05)
    remote.check()
    assert "the endpoint is gone" in refused(next, remote.generate(study, work), error=NobodyLeftError)
    lost.thread.join(20)
    assert str(lost.ended).startswith("device 'cpu' computes nothing more: CUDA error: an illegal memory access")
    assert "illegal memory access was encountered; its work will be repeated" in said[0]
