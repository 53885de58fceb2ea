"""The service with --bridge: vectors in the old space, and everything that says so."""

from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import numpy as np
import pytest
from harness import MakeApp, MakeClient
from live import unit
from tiny_bundle import DIMENSION, OTHER, calibrate, sequence, vector

from cloze.encoding.bridge import About, Bridge, BridgeError
from cloze.encoding.bundle import Bundle

pytestmark = pytest.mark.anyio

OLD = "0123456789abcdef"
ADMIN = "admin-0123456789abcdef"
WIDTH = 7


def write_bridge(path: Path, new: str, seed: int = 0, dimension: int = DIMENSION) -> Bridge:
    rng = np.random.default_rng(seed)
    about = About(kind="affine", old=OLD, new=new, fitted=1, queries=1, searched=1, recall=1.0, least=1.0, most=1.0)
    matrix, offset = rng.normal(size=(dimension, WIDTH)), rng.normal(size=WIDTH)
    Bridge(about, matrix.astype(np.float32), offset.astype(np.float32)).write(path)
    return Bridge.load(path)


@pytest.fixture
def bridge(bundle: Path, tmp_path: Path) -> Path:
    write_bridge(tmp_path / "bridge", Bundle.load(bundle).spec.space)
    return tmp_path / "bridge"


async def vectors(http: Any, path: str = "/embed", **options: Any) -> Any:
    response = await http.post(path, json={"inputs": ["a man", "two dogs run"], **options})
    assert response.status_code == 200, response.text
    return np.array(response.json(), dtype=np.float32)


async def test_vectors_are_mapped_once_before_they_are_cut_and_normalised(client: MakeClient, bridge: Path) -> None:
    made = Bridge.load(bridge)
    texts = np.stack([vector(sequence(text)) for text in ("a man", "two dogs run")])
    expected = unit(texts) @ made.matrix + made.offset
    async with client(bridge=str(bridge)) as http:
        np.testing.assert_allclose(await vectors(http, normalize=False), expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(await vectors(http), unit(expected), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(await vectors(http, dimensions=3), unit(expected[:, :3]), rtol=1e-4, atol=1e-5)
        much = await http.post("/embed", json={"inputs": "a man", "dimensions": WIDTH + 1})
        assert much.status_code == 422


async def test_everything_says_the_old_space(client: MakeClient, bundle: Path, bridge: Path) -> None:
    async with client(bridge=str(bridge)) as http:
        answer = await http.post("/embed", json={"inputs": "a man"}, headers={"if-match": OLD})
        assert (answer.status_code, answer.headers["x-embedding-space"]) == (200, OLD)
        info = (await http.get("/info")).json()
        assert (info["embedding_space"], info["dimension"]) == (OLD, WIDTH)
        new = Bridge.load(bridge).about.new
        assert info["model_sha"] in Bundle.load(bundle).spec.files.values()
        assert info["bridge_sha"] == Bridge.load(bridge).sha256
        assert (await http.post("/embed", json={"inputs": "a"}, headers={"if-match": new})).status_code == 412
        assert f'space="{OLD}"' in (await http.get("/metrics")).text


async def test_heads_and_calibration_do_not_fit_the_old_space(
    client: MakeClient, bundle: Path, bridge: Path, tmp_path: Path
) -> None:
    calibrated = calibrate(Path(copytree(bundle, tmp_path / "calibrated" / "tiny")))
    async with client(bundle=calibrated, bridge=str(bridge)) as http:
        rmtree(calibrated)  # it was read at the start
        for path, body, words in (
            ("/predict", {"inputs": "a man"}, "the heads of model tiny do not fit the vectors that its bridge gives"),
            (
                "/search",
                {"query": "a man", "texts": ["a"], "calibrated": True},
                "the calibration of model tiny does not fit the vectors that its bridge gives",
            ),
        ):
            refused = await http.post(path, json=body)
            assert refused.status_code == 422
            assert words in refused.json()["error"]


async def test_only_the_model_that_it_was_made_for_is_mapped(
    client: MakeClient, two_bundles: Path, tmp_path: Path
) -> None:
    space = Bundle.load(two_bundles / "other").spec.space
    write_bridge(tmp_path / "bridge", space, dimension=OTHER["dimension"])
    async with client(bundle=two_bundles, model="tiny", bridge=str(tmp_path / "bridge")) as http:
        assert (await vectors(http, "/models/tiny/embed")).shape == (2, DIMENSION)
        assert (await vectors(http, "/models/other/embed")).shape == (2, WIDTH)


def test_a_bridge_from_another_space_or_width_is_refused_at_start(
    make_app: MakeApp, bundle: Path, tmp_path: Path
) -> None:
    write_bridge(tmp_path / "foreign", "f" * 16)
    with pytest.raises(
        BridgeError, match=rf"leads from space f{{16}} to {OLD}, but the models have tiny [0-9a-f]{{16}}"
    ):
        make_app(bridge=str(tmp_path / "foreign"))
    write_bridge(tmp_path / "narrow", Bundle.load(bundle).spec.space, dimension=5)
    with pytest.raises(BridgeError, match=r"the bridge takes 5 dimensions, but .* has 16"):
        make_app(bridge=str(tmp_path / "narrow"))
    with pytest.raises(BridgeError, match="absent cannot be read"):
        make_app(bridge=str(tmp_path / "absent"))


async def test_a_reload_takes_a_new_bridge_and_the_cache_does_not_keep_the_old_vectors(
    client: MakeClient, bundle: Path, bridge: Path
) -> None:
    async with client(bridge=str(bridge), admin_keys=ADMIN, cache_mb=1) as http:
        admin = {"headers": {"authorization": f"Bearer {ADMIN}"}}
        before = await vectors(http)
        assert (await http.post("/admin/reload", **admin)).json()["unchanged"] == ["tiny"]
        write_bridge(bridge, Bundle.load(bundle).spec.space, seed=1)
        assert (await http.post("/admin/reload", **admin)).json()["changed"] == ["tiny"]
        after = await vectors(http)
        assert np.abs(after - before).max() > 0.1
        write_bridge(bridge, "f" * 16)
        refused = await http.post("/admin/reload", **admin)
        assert refused.status_code == 409
        assert "leads from space" in refused.text
        np.testing.assert_array_equal(await vectors(http), after)
