"""Clients that people have, unchanged, against a real server."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from harness import Process, Serve
from huggingface_hub import InferenceClient, close_session
from huggingface_hub.errors import HfHubHTTPError
from tiny_bundle import DIMENSION


@pytest.fixture(scope="module")
def server(serve: Serve, bundle: Path) -> Process:
    return serve("--bundle", str(bundle), "--threads", "1")


@pytest.fixture
def hub(server: Process, monkeypatch: pytest.MonkeyPatch) -> Iterator[InferenceClient]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # the other tests run offline
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    yield InferenceClient(model=server.url)
    close_session()


def embed(server: Process, **body: object) -> np.ndarray:
    return np.array(httpx.post(f"{server.url}/embed", json=body).json(), dtype=np.float32)


def test_feature_extraction(hub: InferenceClient, server: Process) -> None:
    found = hub.feature_extraction("a man plays")
    assert found.shape == (1, DIMENSION)
    np.testing.assert_allclose(found, embed(server, inputs="a man plays"), atol=1e-6)


def test_feature_extraction_of_many_with_every_option(hub: InferenceClient, server: Process) -> None:
    texts = ["a man", "", "two dogs run " * 30]
    found = hub.feature_extraction(
        texts, normalize=False, truncate=True, truncation_direction="left", prompt_name=None, dimensions=8
    )
    expected = embed(server, inputs=texts, normalize=False, truncation_direction="left", dimensions=8)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_sentence_similarity(hub: InferenceClient) -> None:
    found = hub.sentence_similarity("a man", ["a man", "dogs run"])
    assert found[0] == pytest.approx(1)
    assert -1 <= found[1] < 1


def test_the_reason_of_a_refusal_reaches_the_user(hub: InferenceClient) -> None:
    with pytest.raises(HfHubHTTPError) as caught:
        hub.feature_extraction("a " * 100, truncate=False)
    assert caught.value.response.status_code == 422
    assert "text 0 has 100 tokens" in str(caught.value)


def test_a_client_that_asks_for_limits_first(server: Process) -> None:
    info = httpx.get(f"{server.url}/info").json()
    assert "embedding" in info["model_type"]
    assert info["max_input_length"] > 0
    assert info["max_client_batch_size"] >= 10_000
