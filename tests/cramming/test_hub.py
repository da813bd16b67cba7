"""One answer to the question whether the hub can be reached, at once, for preparing and for scoring."""

import os

import huggingface_hub.constants as constants
import pytest

from cramming import hub


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # set, so that it is put back
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_without_an_answer_the_clients_are_switched_off() -> None:
    assert "refused" in str(hub.why_unreachable())
    assert hub.prepare_hub.__wrapped__() is False
    assert constants.HF_HUB_OFFLINE and os.environ["HF_HUB_OFFLINE"] == "1"
    assert hub.why_unreachable() == "HF_HUB_OFFLINE is set"


def test_an_endpoint_that_is_no_address_gives_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "mirror.example")
    assert "mirror.example" in str(hub.why_unreachable())


def test_an_answer_leaves_them_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "why_unreachable", lambda: None)
    assert hub.prepare_hub.__wrapped__() is True
    assert not constants.HF_HUB_OFFLINE
