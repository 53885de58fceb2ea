"""Run a bundle's graph: the same vectors as from the service, without the service."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from cloze.encoding.bundle import INPUTS, OUTPUT, Bundle, Precision
from cloze.encoding.text import TextEncoder, token_batches
from cloze.training.bar import bar


class GraphEncoder:
    """A graph, its text encoder and the text encoders of its named templates."""

    def __init__(
        self, graph: Path, text_encoder: TextEncoder, named_encoders: Mapping[str, TextEncoder] | None = None
    ) -> None:
        self.session = session(graph)
        self.text_encoder = text_encoder
        self._named = named_encoders or {}

    @classmethod
    def of(cls, bundle: Bundle, precision: Precision) -> Self:
        """Raises BundleError if the bundle has no graph of that precision."""
        return cls(bundle.graph(precision), bundle.text_encoder, bundle.named)

    def within(self, text_encoder: TextEncoder) -> Self:
        """The same graph with another text encoder."""
        same_graph = copy.copy(self)
        same_graph.text_encoder = text_encoder
        return same_graph

    def named(self, name: str) -> Self:
        """The same graph with the named template, or with its own template if there is none of this name."""
        return self.within(self._named.get(name, self.text_encoder))

    def embed(self, texts: Sequence[str], batch_tokens: int = 8192) -> NDArray[np.float32]:
        """Texts -> vectors (n, d) float32, in the texts' order."""
        return self.embed_ids([tokens.ids for tokens in self.text_encoder.encode(texts)], batch_tokens)

    def embed_ids(self, sequences: Sequence[Sequence[int]], batch_tokens: int = 8192) -> NDArray[np.float32]:
        """Sequences of ids, template included -> vectors (n, d) float32, in the sequences' order."""
        dimension = self.session.get_outputs()[0].shape[1]
        vectors = np.empty((len(sequences), dimension), dtype=np.float32)
        lengths = [len(ids) for ids in sequences]
        with bar(total=sum(lengths), desc="embedding", unit=" tokens", unit_scale=True) as shown:
            for rows in token_batches(lengths, batch_tokens):
                batch = self.text_encoder.pad([sequences[row] for row in rows])
                vectors[rows] = self.session.run([OUTPUT], dict(zip(INPUTS, batch, strict=True)))[0]
                shown.update(sum(lengths[row] for row in rows))
        return vectors


def session(graph: Path | bytes) -> onnxruntime.InferenceSession:
    """Open a graph, given as a path or as bytes, on CUDA if there is a GPU, otherwise on the CPU."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    source = graph if isinstance(graph, bytes) else str(graph)
    exact = {"use_tf32": "0"}  # TF32 moves a vector by 1.5e-4 of its length
    has_cuda = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    providers = [("CUDAExecutionProvider", exact)] if has_cuda else []
    return onnxruntime.InferenceSession(source, options, providers=[*providers, "CPUExecutionProvider"])
