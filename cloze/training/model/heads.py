"""The head after pooling: used in training only, or kept in the encoder and served.

The kind of head decides where denoising subtracts: before a tanh head, but after a transform head.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self, get_args

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.activations import ACT2FN

HEAD_FILE = "head.safetensors"

HeadKind = Literal["tanh", "transform"]


class ProjectionHead(nn.Sequential):
    """Vectors (n, d) -> vectors (n, d), initialised as BERT initialises its own weights.

    `tanh` is the contrastive papers' Linear(d, d) and tanh. `transform` is a masked-word head without its output
    matrix: Linear(d, d), activation, layer norm.
    """

    def __init__(self, kind: HeadKind, config: PretrainedConfig) -> None:
        width = config.hidden_size
        dense = nn.Linear(width, width)
        nn.init.normal_(dense.weight, std=getattr(config, "initializer_range", 0.02))
        nn.init.zeros_(dense.bias)
        if kind == "tanh":
            super().__init__(dense, nn.Tanh())
        else:
            activation = ACT2FN[getattr(config, "hidden_act", "gelu")]
            super().__init__(dense, activation, nn.LayerNorm(width, eps=getattr(config, "layer_norm_eps", 1e-12)))
        self.kind: HeadKind = kind

    def forward(self, vectors: Tensor, bias: Tensor | None = None) -> Tensor:
        """`bias` (n, d) is the vector of the template alone. `tanh` sees the difference, `transform` each alone."""
        if bias is None:
            return self._layers(vectors)
        if self.kind == "tanh":
            return self._layers(vectors - bias)
        return self._layers(vectors) - self._layers(bias)

    def _layers(self, vectors: Tensor) -> Tensor:
        for layer in self:
            vectors = layer(vectors)
        return vectors

    def save(self, folder: Path) -> None:
        """Write HEAD_FILE, which also holds the kind."""
        state = {key: weight.contiguous() for key, weight in self.state_dict().items()}
        save_file(state, folder / HEAD_FILE, metadata={"kind": self.kind})

    @classmethod
    def load(cls, folder: Path, config: PretrainedConfig) -> Self | None:
        """Read the file that `save` wrote; None if there is none.

        Raises ValueError, OSError, RuntimeError or SafetensorError if it does not hold a head of this width.
        """
        path = folder / HEAD_FILE
        if not path.is_file():
            return None
        with safe_open(path, "pt") as file:
            written = (file.metadata() or {}).get("kind")
            kinds: tuple[HeadKind, ...] = get_args(HeadKind)
            kind = next((kind for kind in kinds if kind == written), None)
            if kind is None:
                raise ValueError(f"its kind is {written!r}")
            head = cls(kind, config)
            head.load_state_dict({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 - not a dict
        return head


class AdoptedHead(nn.ModuleList):
    """The modules that follow a sentence-transformers model's pooling: vectors (n, d) -> vectors (n, `dimension`)."""

    def __init__(self, modules: Sequence[nn.Module], dimension: int) -> None:
        super().__init__(modules)
        self.dimension = dimension

    @property
    def kind(self) -> str:
        return " and ".join(type(module).__name__ for module in self)

    def forward(self, vectors: Tensor, bias: Tensor | None = None) -> Tensor:
        assert bias is None, "an adopted model has no denoising. This is a bug."
        features = {"sentence_embedding": vectors}
        for module in self:
            features = module(features)
        return features["sentence_embedding"]
