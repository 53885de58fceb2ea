"""The contenders of the serving benchmark: servers, libraries in processes of their own, and the bare session.

All have the same weights. Every server answers a POST with OpenAI's body, {"model", "input"}. Only the contender that
is being measured runs; the others are paused with SIGSTOP.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import psutil
from numpy.typing import NDArray

from cloze.encoding.bundle import GRAPHS, Bundle, Precision, Provenance, seal, staging
from cloze.encoding.template import PoolingMode
from cloze.encoding.text import TOKENIZER_FILES
from cloze.service.inference.session import Session
from cloze.service.inference.threads import share_threads
from cloze.training.export.bundle import make_graph
from cloze.training.export.graph import trace
from cloze.training.model.encoder import SentenceEncoder, weights_digest

__all__ = ["InProcess", "Peer", "Raw", "Server", "bundle_of", "infinity", "ours", "truncate", "with_graphs"]

START_SECONDS: Final = 120
MAX_TOKENS: Final = 256  # sentence-transformers truncates the texts of all-MiniLM-L6-v2 to this length
OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
ENCODE: Final = Path(__file__).parent / "encode.py"


class Peer:
    """A process that embeds."""

    def __init__(self, command: Sequence[str], folder: Path | None = None, **pipes: Any) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("CLOZE_")}
        self.process = subprocess.Popen(
            command, cwd=folder, env=environ | OFFLINE, stdout=pipes.get("stdout", subprocess.DEVNULL),
            stdin=pipes.get("stdin"), stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._known = psutil.Process(self.process.pid)

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of the process and of all processes that it started."""
        return sum(sum(process.cpu_times()[:2]) for process in self._family())

    @property
    def peak_mb(self) -> float:
        """Highest resident memory, in MiB."""
        status = [Path(f"/proc/{process.pid}/status").read_text(encoding="ascii") for process in self._family()]
        peaks = [line.split()[1] for text in status for line in text.splitlines() if line.startswith("VmHWM")]
        return sum(map(int, peaks)) / 1024

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Let the process run inside the block, and pause it afterwards."""
        self._send(signal.SIGCONT)
        try:
            yield
        finally:
            self._send(signal.SIGSTOP)

    def end(self) -> None:
        self._send(signal.SIGKILL)
        self.process.wait()

    def _family(self) -> list[psutil.Process]:
        return [self._known, *self._known.children(recursive=True)]

    def _send(self, number: int) -> None:
        for process in self._family():
            process.send_signal(number)


class Server(Peer):
    """A server on 127.0.0.1; `started` is the seconds from its command to its first answer."""

    def __init__(self, command: Sequence[str], path: str, model: str, folder: Path | None = None) -> None:
        self.port, self.path, self.model = _free_port(), path, model
        began = time.perf_counter()
        super().__init__([*command, "--port", str(self.port)], folder)
        while not self._answers():
            if self.process.poll() is not None or time.perf_counter() - began > START_SECONDS:
                raise OSError(f"{' '.join(command)} does not answer")
            time.sleep(0.02)
        self.started = time.perf_counter() - began

    def request(self, texts: Sequence[str]) -> bytes:
        """One complete HTTP request."""
        body = json.dumps({"model": self.model, "input": list(texts)}).encode()
        head = f"POST {self.path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        return f"{head}\r\n\r\n".encode() + body

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 5) as line:
                line.settimeout(START_SECONDS)
                line.sendall(self.request(["a"]))
                return line.recv(12) == b"HTTP/1.1 200"
        except OSError:
            return False


class InProcess(Peer):
    """A library without HTTP: it reads texts from a pipe and returns the seconds that it took to embed them."""

    def __init__(self, python: str, backend: str, model: Path, texts: Path) -> None:
        super().__init__(
            [python, str(ENCODE), backend, str(model), str(texts)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        if not (versions := self._line()):
            raise OSError(f"{python} cannot embed by {backend}")
        self.versions: dict[str, str] = json.loads(versions)

    def encode(self, texts: Sequence[str]) -> tuple[float, NDArray[np.float32]]:
        """Seconds of the call, and the vectors."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(list(texts)) + "\n")
        self.process.stdin.flush()
        reply = json.loads(self._line())
        return reply["seconds"], np.array(reply["vectors"], dtype=np.float32)

    def end(self) -> None:
        assert self.process.stdin is not None
        self._send(signal.SIGCONT)
        self.process.stdin.close()  # then it removes its files
        self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


class Raw:
    """Upper bound: only tokenising and the session, on sorted batches of the service's size and concurrency."""

    def __init__(self, bundle: Path, precision: Precision) -> None:
        threads = share_threads(0)
        self.bundle = Bundle.load(bundle)
        self.session = Session.load(self.bundle, precision=precision, provider="cpu", threads=threads.per_batch)
        self.pool = ThreadPoolExecutor(threads.batches)

    def one_by_one(self, texts: Sequence[str]) -> list[float]:
        """Seconds of each text alone: what a request of one text costs without HTTP."""
        encoder, seconds = self.bundle.text_encoder, []
        for text in texts:
            began = time.perf_counter()
            self.session.run(encoder.pad([tokens.ids for tokens in encoder.encode([text])]))
            seconds.append(time.perf_counter() - began)
        return seconds

    def encode(self, texts: Sequence[str]) -> tuple[float, float]:
        """Seconds and CPU seconds of the call."""
        began, cpu = time.perf_counter(), time.process_time()
        encoder, batches = self.bundle.text_encoder, [list[list[int]]()]
        for ids in sorted((tokens.ids for tokens in encoder.encode(texts)), key=len):
            if batches[-1] and len(ids) * (len(batches[-1]) + 1) > self.session.batches.tokens:
                batches.append([])
            batches[-1].append(ids)
        list(self.pool.map(lambda rows: self.session.run(encoder.pad(rows)), batches))
        return time.perf_counter() - began, time.process_time() - cpu


def ours(bundle: Path, precision: Precision) -> Server:
    command = [sys.executable, "-m", "cloze.service", "--bundle", str(bundle), "--precision", precision]
    return Server(command, "/v1/embeddings", bundle.name)


def infinity(python: str, model: Path, engine: str) -> Server:
    """`engine` is torch or optimum; optimum runs the model.onnx of the folder in which it starts."""
    command = [str(Path(python).parent / "infinity_emb"), "v2", "--model-id", ".", "--engine", engine]
    options = ["--device", "cpu", "--no-bettertransformer", "--pooling-method", "mean"]
    options += ["--served-model-name", "minilm"]
    return Server([*command, *options], "/embeddings", "minilm", model)


def bundle_of(
    model: Path,
    out: Path,
    precisions: Sequence[Precision] = ("fp32", "int8"),
    *,
    template: str = "[X]",
    pooling: PoolingMode = "mean",
    max_tokens: int = MAX_TOKENS,
) -> Path:
    """Make a bundle of an encoder."""
    encoder = SentenceEncoder.load(str(model), template=template, pooling=pooling, max_tokens=max_tokens)
    traced = cache(partial(trace, encoder))
    with staging(out) as folder:
        (folder / "onnx").mkdir()
        for precision in precisions:
            onnx.save(make_graph(precision, traced, encoder)[0], folder / GRAPHS[precision])
        for name in ("README.md", "config.json", *TOKENIZER_FILES):
            shutil.copyfile(model / name, folder / name)
        nothing: dict[str, Any] = {"recipe": {}, "data": [], "commit": None, "seeds": [], "scores": {}, "parity": {}}
        provenance = Provenance(parent=model.name, **nothing)
        seal(folder, encoder.config, encoder.dimension, weights_digest(encoder), provenance)
    return out


def with_graphs(model: Path, pythons: Sequence[str], gguf: Path | None, out: Path) -> Path:
    """Copy the model with `gguf` as model.gguf and, if an environment of `pythons` has optimum, with model.onnx."""
    shutil.copytree(model, out, symlinks=False)
    if gguf:
        shutil.copyfile(gguf, out / "model.gguf")
    for python in pythons:
        with tempfile.TemporaryDirectory() as exported:
            command = [python, "-m", "optimum.exporters.onnx", "--model", str(model), "--task", "feature-extraction"]
            command += ["--library-name", "transformers", exported]
            done = subprocess.run(command, capture_output=True, env=os.environ | OFFLINE, check=False)
            if done.returncode == 0:
                shutil.copyfile(Path(exported, "model.onnx"), out / "model.onnx")
                break
    return out


def truncate(model: Path) -> None:
    """Make MAX_TOKENS the tokenizer's limit too, for contenders that read no other file."""
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"model_max_length": MAX_TOKENS}), encoding="utf-8")


def _free_port() -> int:
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        return int(line.getsockname()[1])
