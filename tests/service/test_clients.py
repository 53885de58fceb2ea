"""Clients that people have, unchanged, against a real server; and what programs that are not run here send."""

import asyncio
import gc
import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from harness import Process, Serve, wait_until
from huggingface_hub import InferenceClient, close_session
from huggingface_hub.errors import HfHubHTTPError
from live import ServeHeld, connect, request
from numpy.typing import NDArray
from tiny_bundle import DIMENSION

TEXTS = ["a man plays", "", "two dogs run " * 30]
KEY = "the-key-of-a-test"


@pytest.fixture(scope="module")
def server(serve: Serve, bundle: Path) -> Process:
    return serve("--bundle", str(bundle), "--threads", "1")


@pytest.fixture(scope="module")
def locked(serve: Serve, bundle: Path) -> Process:
    """Needs a key."""
    return serve("--bundle", str(bundle), "--threads", "1", "--api-keys", KEY)


@pytest.fixture(scope="module")
def of_ids(serve: Serve, bundle: Path) -> Process:
    """Takes token ids."""
    return serve("--bundle", str(bundle), "--threads", "1", "--token-ids")


@pytest.fixture(scope="module")
def narrow(serve_held: ServeHeld, bundle: Path) -> Process:
    """Is full with one request. Two of its three threads may be held by requests that are given up."""
    options = ("--provider", "cpu", "--threads", "3", "--max-tokens-in-flight", "1")
    return serve_held("--bundle", str(bundle), *options)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_BASE", "HUGGINGFACE_API_KEY", "LANGSMITH_TRACING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # the other tests run offline
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)


@pytest.fixture
def collected() -> Iterator[None]:
    yield
    gc.collect()


def untidy(test: Callable[..., None]) -> Callable[..., None]:
    """Its client leaves sockets to the garbage collector."""
    return pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")(pytest.mark.usefixtures("collected")(test))


def embed(server: Process, **body: object) -> NDArray[np.float32]:
    """What /embed gives, which other tests compare with the model itself."""
    response = httpx.post(f"{server.url}/embed", json={"inputs": TEXTS} | body).raise_for_status()
    return np.array(response.json(), dtype=np.float32)


def same(found: object, expected: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(np.array(found, dtype=np.float32), expected, rtol=0, atol=1e-6)


# huggingface_hub


@pytest.fixture
def hub(server: Process) -> Iterator[InferenceClient]:
    yield InferenceClient(model=server.url)
    close_session()


def test_hub_gets_vectors_with_every_option(hub: InferenceClient, server: Process) -> None:
    assert hub.feature_extraction("a man plays").shape == (1, DIMENSION)
    found = hub.feature_extraction(
        TEXTS, normalize=False, truncate=True, truncation_direction="left", prompt_name=None, dimensions=8
    )
    same(found, embed(server, normalize=False, truncation_direction="left", dimensions=8))


def test_hub_gets_similarities(hub: InferenceClient) -> None:
    found = hub.sentence_similarity("a man", ["a man", "dogs run"])
    assert found[0] == pytest.approx(1)
    assert -1 <= found[1] < 1


def test_hub_gets_labels(server: Process) -> None:
    found = InferenceClient(model=f"{server.url}/predict").text_classification("a man plays")
    response = httpx.post(f"{server.url}/predict", json={"inputs": "a man plays"}).raise_for_status()
    best = response.json()[0]  # the client takes the first of what it gets to be the list
    assert (found.label, found.score) == (best["label"], best["score"])  # type: ignore[attr-defined]
    close_session()


def test_hub_chooses_a_model_by_its_address(server: Process) -> None:
    client = InferenceClient(model=f"{server.url}/models/tiny", provider="hf-inference")
    same(client.feature_extraction(TEXTS), embed(server))
    assert client.get_endpoint_info()["model_id"] == "tiny"
    assert client.health_check()
    with pytest.raises(HfHubHTTPError, match="404"):
        InferenceClient(model=f"{server.url}/models/other").feature_extraction("a man")
    close_session()


def test_hub_shows_the_reason_of_a_refusal(hub: InferenceClient) -> None:
    with pytest.raises(HfHubHTTPError) as caught:
        hub.feature_extraction("a " * 100, truncate=False)
    assert caught.value.response.status_code == 422
    assert "text 0 has 100 tokens" in str(caught.value)


def test_hub_sends_its_token(locked: Process) -> None:
    assert InferenceClient(model=locked.url, token=KEY).feature_extraction("a man").shape == (1, DIMENSION)
    with pytest.raises(HfHubHTTPError, match="401"):
        InferenceClient(model=locked.url, token="another-key-of-a-test").feature_extraction("a man")
    close_session()


# openai


def client(server: Process, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", **{"api_key": "none", "max_retries": 0} | options)


@pytest.fixture
def ai(server: Process) -> Iterator[openai.OpenAI]:
    with client(server) as made:
        yield made


def test_openai_asks_for_base64_by_itself(ai: openai.OpenAI, server: Process) -> None:
    answer = ai.embeddings.with_raw_response.create(model="tiny", input=TEXTS)
    assert all(isinstance(row["embedding"], str) for row in json.loads(answer.text)["data"])
    parsed = answer.parse()
    assert [row.index for row in parsed.data] == [0, 1, 2]
    assert parsed.model == "tiny"
    np.testing.assert_array_equal(rows(parsed), embed(server))  # exact: the same float32


def test_openai_gets_numbers_and_fewer_dimensions(ai: openai.OpenAI, server: Process) -> None:
    found = ai.embeddings.create(model="tiny", input="a man plays", encoding_format="float", dimensions=4, user="me")
    same(rows(found), embed(server, inputs="a man plays", dimensions=4))


def test_openai_is_refused_token_ids_with_the_switch_to_turn(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False") as caught:
        ai.embeddings.create(model="tiny", input=[[9, 10], [11]])
    assert caught.value.type == "invalid_request_error"


def test_openai_sends_the_models_own_ids_where_they_are_allowed(of_ids: Process) -> None:
    shown = {"inputs": TEXTS, "add_special_tokens": False}
    tokens = httpx.post(f"{of_ids.url}/tokenize", json=shown).json()
    ids = [[token["id"] for token in text] for text in tokens]
    with client(of_ids) as ai:
        same(rows(ai.embeddings.create(model="tiny", input=ids[::2])), embed(of_ids)[::2])
        same(rows(ai.embeddings.create(model="tiny", input=ids[0])), embed(of_ids)[:1])
        with pytest.raises(openai.BadRequestError, match="1000000"):
            ai.embeddings.create(model="tiny", input=[[1_000_000]])


def test_openai_lists_the_models(ai: openai.OpenAI) -> None:
    [model] = ai.models.list()
    assert (model.id, model.object) == ("tiny", "model")
    assert 0 < model.created <= time.time()
    assert ai.models.retrieve("tiny") == model
    for ask in (lambda: ai.models.retrieve("other"), lambda: ai.embeddings.create(model="other", input="a man")):
        with pytest.raises(openai.NotFoundError, match=r"'other'.*tiny") as caught:
            ask()
        assert caught.value.code == "model_not_found"
        assert caught.value.request_id


def test_openai_needs_a_key_that_is_known(locked: Process) -> None:
    with client(locked, api_key=KEY) as ai:
        assert len(ai.embeddings.create(model="tiny", input=TEXTS).data) == 3
        assert [model.id for model in ai.models.list()] == ["tiny"]
    with client(locked) as ai, pytest.raises(openai.AuthenticationError) as caught:
        ai.embeddings.create(model="tiny", input=TEXTS)
    assert caught.value.code == "invalid_api_key"


def test_openai_at_once_from_many_tasks(server: Process) -> None:
    async def ask() -> list[NDArray[np.float32]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as ai:
            return [rows(each) for each in await asyncio.gather(*(ai.embeddings.create(**wanted) for _ in range(20)))]

    wanted: dict[str, Any] = {"model": "tiny", "input": TEXTS}
    for found in asyncio.run(ask()):
        same(found, embed(server))


def test_openai_tries_again_and_then_says_that_the_service_is_full(narrow: Process) -> None:
    before = refused(narrow)
    with occupied(narrow), client(narrow, max_retries=1) as ai, pytest.raises(openai.RateLimitError) as caught:
        ai.embeddings.create(model="tiny", input="a man")
    assert refused(narrow) == before + 2
    assert caught.value.code == "rate_limit_exceeded"
    assert int(caught.value.response.headers["retry-after"]) > 0


def test_openai_tries_again_until_there_is_room(narrow: Process) -> None:
    before = refused(narrow)
    with client(narrow, max_retries=10) as ai, ThreadPoolExecutor(1) as other:
        with occupied(narrow):
            answer = other.submit(ai.embeddings.create, model="tiny", input="a man")
            wait_until(lambda: refused(narrow) > before)
        assert len(answer.result().data) == 1


def rows(answer: openai.types.CreateEmbeddingResponse) -> NDArray[np.float32]:
    return np.array([row.embedding for row in answer.data], dtype=np.float32)


@contextmanager
def occupied(server: Process) -> Iterator[None]:
    """A request in flight, whose batch is held, and which is given up at the end of the block."""
    with connect(server.url) as line:
        line.sendall(request({"inputs": "two dogs"}))
        wait_until(lambda: metric(server, "cloze_tokens_in_flight") > 0)
        yield


def refused(server: Process) -> float:
    return metric(server, 'cloze_failures_total{reason="Overloaded"}')


def metric(server: Process, name: str) -> float:
    page = httpx.get(f"{server.url}/metrics").text
    return next(float(line.split()[-1]) for line in page.splitlines() if line.rpartition(" ")[0] == name)


# LangChain


def langchain(server: Process, **options: Any) -> Any:
    from langchain_openai import OpenAIEmbeddings

    return OpenAIEmbeddings(base_url=f"{server.url}/v1", api_key="none", model="tiny", max_retries=0, **options)


@untidy
def test_langchain_with_the_switch_gets_vectors(server: Process) -> None:
    embeddings = langchain(server, check_embedding_ctx_length=False)
    same(embeddings.embed_documents(TEXTS), embed(server))
    same(embeddings.embed_query(TEXTS[0]), embed(server)[0])


@untidy
def test_langchain_without_the_switch_is_told_of_it(server: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec("llama_index.core")  # holds OpenAI's vocabulary, which tiktoken would fetch
    assert found is not None
    assert found.submodule_search_locations is not None
    vocabulary = Path(found.submodule_search_locations[0], "_static", "tiktoken_cache")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(vocabulary))
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        langchain(server).embed_documents(["a man plays"])


# LlamaIndex


def llama(server: Process, **options: Any) -> Any:
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

    given = {"base_url": server.url, "text_instruction": "", "query_instruction": ""} | options
    return TextEmbeddingsInference(model_name="tiny", **given)


@pytest.mark.parametrize("path", ["", "/models/tiny"])
def test_llamaindex_as_of_text_embeddings_inference(server: Process, path: str) -> None:
    embedding = llama(server, base_url=server.url + path)
    same(embedding.get_text_embedding_batch(TEXTS), embed(server))
    same(embedding.get_query_embedding(TEXTS[0]), embed(server)[0])


def test_llamaindex_sends_its_token(locked: Process) -> None:
    assert len(llama(locked, auth_token=KEY).get_text_embedding("a man")) == DIMENSION


@untidy
def test_llamaindex_as_of_openai(server: Process) -> None:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    embedding = OpenAILikeEmbedding(model_name="tiny", api_base=f"{server.url}/v1", api_key="none", max_retries=1)
    same(embedding.get_text_embedding_batch(TEXTS), embed(server))


# Haystack


@untidy
def test_haystack(server: Process) -> None:
    from haystack import Document
    from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
    from haystack.utils import Secret

    options: dict[str, Any] = {
        "api_base_url": f"{server.url}/v1",
        "api_key": Secret.from_token("none"),
        "model": "tiny",
        "max_retries": 0,
    }
    documents = OpenAIDocumentEmbedder(**options, batch_size=2, progress_bar=False, raise_on_failure=True)
    documents.warm_up()
    found = documents.run([Document(id=str(place), content=text) for place, text in enumerate(TEXTS)])
    same([document.embedding for document in found["documents"]], embed(server))
    query = OpenAITextEmbedder(**options)
    query.warm_up()
    same(query.run(TEXTS[0])["embedding"], embed(server)[0])
    documents.close()
    query.close()


def haystack(server: Process, **options: Any) -> Any:
    from haystack_integrations.components.embedders.huggingface_api import HuggingFaceAPIDocumentEmbedder

    service = {"api_type": "text_embeddings_inference", "api_params": {"url": server.url}, "progress_bar": False}
    return HuggingFaceAPIDocumentEmbedder(**service | options)


def documents() -> list[Any]:
    from haystack import Document

    return [Document(id=str(place), content=text) for place, text in enumerate(TEXTS)]


def test_haystack_as_of_text_embeddings_inference(server: Process) -> None:
    for path, normalize in (("", True), ("/models/tiny", False)):
        embedder = haystack(server, api_params={"url": server.url + path}, batch_size=2, normalize=normalize)
        found = embedder.run(documents())["documents"]
        same([document.embedding for document in found], embed(server, normalize=normalize))
    close_session()


def test_haystack_as_of_text_embeddings_inference_embeds_a_query(server: Process) -> None:
    from haystack_integrations.components.embedders.huggingface_api import HuggingFaceAPITextEmbedder

    service = {"api_type": "text_embeddings_inference", "api_params": {"url": server.url}}
    same(HuggingFaceAPITextEmbedder(**service, normalize=True).run(TEXTS[0])["embedding"], embed(server)[0])
    close_session()


def test_haystack_shows_the_reason_of_a_refusal(server: Process, locked: Process) -> None:
    from haystack.utils import Secret

    for refused, reason in (
        (haystack(server, api_params={"url": f"{server.url}/models/other"}), "no model 'other' is served"),
        (haystack(server, truncate=False), "text 2 has 90 tokens"),
        (haystack(locked, token=None), "no API key was sent"),
    ):
        with pytest.raises(HfHubHTTPError, match=reason):
            refused.run(documents())
    assert haystack(locked, token=Secret.from_token(KEY)).run(documents())["documents"][0].embedding
    close_session()


# Chroma


@untidy
def test_chroma(server: Process) -> None:
    from chromadb.utils.embedding_functions import HuggingFaceEmbeddingServer

    for path in ("", "/models/tiny/embed"):
        same(HuggingFaceEmbeddingServer(url=server.url + path)(TEXTS), embed(server))


@untidy
def test_chroma_sends_its_key(locked: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    from chromadb.utils.embedding_functions import HuggingFaceEmbeddingServer

    monkeypatch.setenv("CHROMA_KEY", KEY)
    assert len(HuggingFaceEmbeddingServer(url=locked.url, api_key_env_var="CHROMA_KEY")(TEXTS)) == 3


@untidy
def test_chroma_as_of_openai(server: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    from chromadb.utils.embedding_functions import OpenAIEmbeddingFunction

    monkeypatch.setenv("CHROMA_KEY", "none")
    found = OpenAIEmbeddingFunction(api_key_env_var="CHROMA_KEY", api_base=f"{server.url}/v1", model_name="tiny")(TEXTS)
    same(found, embed(server))


@untidy
def test_chroma_searches_an_index_of_its_own(server: Process, tmp_path: Path) -> None:
    import chromadb
    from chromadb.utils.embedding_functions import HuggingFaceEmbeddingServer

    space = httpx.post(f"{server.url}/embed", json={"inputs": "a"}).headers["x-embedding-space"]
    function: Any = HuggingFaceEmbeddingServer(url=f"{server.url}/embed")
    store = chromadb.PersistentClient(tmp_path)
    made = store.create_collection("texts", embedding_function=function, metadata={"embedding_space": space})
    made.add(ids=["0", "1"], documents=TEXTS[::2])
    kept = store.get_collection("texts", embedding_function=function)
    assert kept.metadata == {"embedding_space": space}
    assert kept.query(query_texts=[TEXTS[0]], n_results=1)["ids"] == [["0"]]
    rows = kept.get(include=["embeddings"])["embeddings"]
    same(rows, embed(server)[::2])


# Programs that are not run here: the HTTP that their sources send

OPTIONS = {"wait_for_model": True, "use_gpu": False, "use_cache": True}


PROGRAMS: list[tuple[str, str, dict[str, Any]]] = [
    ("LiteLLM openai/, Open WebUI", "/v1/embeddings", {"input": TEXTS, "model": "tiny"}),
    ("Dify huggingface_tei", "/v1/embeddings", {"input": TEXTS}),
    ("Dify OpenAI", "/v1/embeddings", {"input": TEXTS, "model": "tiny", "encoding_format": "float"}),
    ("RAGFlow OpenAI", "/v1/embeddings", {"input": TEXTS, "encoding_format": "float", "drop_params": True}),
    ("without /v1", "/embeddings", {"input": TEXTS, "model": "tiny"}),
    ("RAGFlow HuggingFace", "/embed", {"inputs": TEXTS}),
    ("Milvus TEI function", "/embed", {"inputs": TEXTS, "truncate": True, "truncation_direction": "Right"}),
    ("LiteLLM huggingface/", "/", {"inputs": TEXTS}),
    ("Weaviate text2vec-huggingface", "/", {"inputs": TEXTS, "options": OPTIONS}),
    ("Haystack 2, Hugging Face", "/", {"inputs": TEXTS, "truncate": True, "normalize": True}),
]


def test_what_other_programs_send(server: Process, subtests: pytest.Subtests) -> None:
    for program, path, body in PROGRAMS:
        with subtests.test(program):
            answer = httpx.post(server.url + path, json=body, headers={"authorization": "Bearer none"})
            found = answer.raise_for_status().json()
            same([row["embedding"] for row in found["data"]] if isinstance(found, dict) else found, embed(server))


@pytest.mark.parametrize("path", ["", "/models/tiny"])
def test_what_dify_asks_first(server: Process, path: str) -> None:
    url = server.url + path
    info = httpx.get(f"{url}/info").json()
    assert "embedding" in info["model_type"]
    assert info["max_input_length"] > 0
    assert info["max_client_batch_size"] >= 10_000
    [tokens] = httpx.post(f"{url}/tokenize", json={"inputs": "a man"}).json()
    own = [token for token in tokens if token["start"] is not None]
    assert [token["text"] for token in own] == ["a", "man"]
    assert not any(token["special"] for token in own)
    assert httpx.post(f"{url}/v1/embeddings", json={"input": ["a man"]}).json()["usage"]["total_tokens"] > 0
