"""The head behind the vector that is read: in training only, or kept in the encoder and served.

A head knows where denoising stands: before a tanh, or between two transformed vectors.
"""

from pathlib import Path
from typing import Literal, Self, get_args

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.activations import ACT2FN

from training.errors import EncoderError

__all__ = ["HEAD_FILE", "Head", "HeadKind"]

HEAD_FILE = "head.safetensors"

HeadKind = Literal["tanh", "transform"]


class Head(nn.Sequential):
    """Vectors (n, d) -> vectors (n, d), drawn as BERT draws its own weights.

    `tanh` is the contrastive papers' Linear(d, d) and tanh; `transform` the layers of a masked-word head before its
    output matrix: Linear(d, d), activation, layer norm.
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
        self.kind = kind

    def forward(self, vectors: Tensor, bias: Tensor | None = None) -> Tensor:
        """`bias` (n, d) is what the template alone gives: a tanh sees the difference, a transform each on its own."""
        if bias is None:
            return super().forward(vectors)
        if self.kind == "tanh":
            return super().forward(vectors - bias)
        return super().forward(vectors) - super().forward(bias)

    def save(self, folder: Path) -> None:
        """Write HEAD_FILE, which tells its kind."""
        state = {key: weight.contiguous() for key, weight in self.state_dict().items()}
        save_file(state, folder / HEAD_FILE, metadata={"kind": self.kind})

    @classmethod
    def load(cls, folder: Path, config: PretrainedConfig) -> Self | None:
        """Read back what `save` wrote; None where the folder has no head. Raises EncoderError."""
        path = folder / HEAD_FILE
        if not path.is_file():
            return None
        try:
            with safe_open(path, "pt") as file:
                kind = (file.metadata() or {}).get("kind")
                if kind not in get_args(HeadKind):
                    raise ValueError(f"its kind is {kind!r}")
                head = cls(kind, config)
                head.load_state_dict({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 - no dict
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise EncoderError(f"{path} holds no head of this encoder ({reason}); restore the folder") from error
        return head
