"""/similarity and /search with `calibrated`: the curve of the bundle over the same cosines."""

import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from harness import MakeBundle, MakeClient
from tiny_bundle import CURVE, calibrate, write_bundle

pytestmark = pytest.mark.anyio

TEXTS = ["a man plays", "two dogs run", "the guitar"]
INPUTS: list[dict[str, Any]] = [
    {"source_sentence": TEXTS[0], "sentences": TEXTS},
    {"pairs": [TEXTS[:2], TEXTS[1:]]},
    {"source_sentences": TEXTS[:2], "sentences": TEXTS},
]


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_values_are_the_curve_of_the_cosines(client: MakeClient, tmp_path: Path) -> None:
    async with client(bundle=calibrate(write_bundle(tmp_path / "tiny"))) as http:
        for inputs in INPUTS:
            cosines = await post(http, "/similarity", inputs=inputs)
            found = await post(http, "/similarity", inputs=inputs, calibrated=True)
            np.testing.assert_allclose(found, CURVE(np.array(cosines)), atol=1e-12)
            assert await post(http, "/", inputs=inputs, calibrated=True) == found
        plain = await post(http, "/search", query=TEXTS[0], texts=TEXTS)
        found = await post(http, "/search", query=TEXTS[0], texts=TEXTS, calibrated=True)
        assert [each["index"] for each in found] == [each["index"] for each in plain]
        expected = CURVE(np.array([each["score"] for each in plain]))
        np.testing.assert_allclose([each["score"] for each in found], expected, atol=1e-12)
        assert (await http.get("/info")).json()["calibration"] == {
            "meaning": "probability", "lowest": 0, "highest": 1, "source": "pairs.csv", "pairs": 300, "error": 0.02,
            "thresholds": {"F1": 0.45},
        }  # fmt: skip


async def test_cosines_of_other_templates_have_no_meaning(
    client: MakeClient, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    templates = {"query": "dogs [X] means [MASK].", "document": "man [X] means [MASK]."}
    bundle = calibrate(shutil.copytree(make_bundle(templates=templates), tmp_path / "tiny"))
    async with client(bundle=bundle, alias="asks=tiny:query") as http:
        for path, body in (
            ("/search", {"query": "a", "texts": TEXTS}),
            ("/similarity", {"inputs": INPUTS[0], "parameters": {"prompt_name": "query"}}),
            ("/models/asks/similarity", {"inputs": INPUTS[0]}),
        ):
            assert (await http.post(path, json=body)).status_code == 200
            response = await http.post(path, json=body | {"calibrated": True})
            assert response.status_code == 422
            assert "use the template 'query'; the calibration of model tiny holds only for" in response.json()["error"]
        assert len(await post(http, "/similarity", inputs=INPUTS[0], calibrated=True)) == 3
        assert (await http.get("/info")).json()["calibration"] is not None
        assert (await http.get("/models/asks/info")).json()["calibration"] is None


async def test_a_threshold_keeps_what_reaches_it(client: MakeClient, tmp_path: Path) -> None:
    async with client(bundle=calibrate(write_bundle(tmp_path / "tiny"))) as http:
        for calibrated in (False, True):
            body = {"query": TEXTS[0], "texts": TEXTS, "calibrated": calibrated}
            found = await post(http, "/search", **body)
            for count, each in enumerate(found, 1):
                assert await post(http, "/search", **body, threshold=each["score"]) == found[:count]
            assert await post(http, "/search", **body, threshold=1.1) == []
            assert await post(http, "/search", **body, threshold=-1, top_k=1) == found[:1]


async def test_a_model_without_a_curve_says_how_to_add_one(
    both: httpx.AsyncClient, client: MakeClient, tmp_path: Path
) -> None:
    for path, body in (
        ("/similarity", {"inputs": INPUTS[0]}),
        ("/search", {"query": "a", "texts": TEXTS}),
    ):
        response = await both.post(path, json=body | {"calibrated": True})
        assert response.status_code == 422
        assert (
            "model tiny has no calibration of its fp32 graph; omit calibrated, or add one" in response.json()["error"]
        )
    assert (await both.get("/info")).json()["calibration"] is None
    async with client(bundle=calibrate(write_bundle(tmp_path / "tiny"), "int8")) as http:
        assert (await http.post("/similarity", json={"inputs": INPUTS[0], "calibrated": True})).status_code == 422
        assert (await http.get("/info")).json()["calibration"] is None
