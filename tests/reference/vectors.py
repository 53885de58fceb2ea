"""The shipped model's vectors of twenty texts, as a CPU with AVX2 gave them; others are held against them.

    python tests/reference/vectors.py          write them anew, after the model was trained again
    python tests/reference/vectors.py --json   print this machine's, in base64

The second runs under an emulated CPU too, so this imports no more than the service's session.
"""

import base64
import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "cloze-mini"
FILE = Path(__file__).with_name("vectors.npy")

TEXTS = (
    "",
    "a",
    "?!",
    "[MASK]",
    "The word [MASK] is not a mask, and [SEP] ends nothing.",
    "A man is playing the guitar.",
    "Someone plays an instrument.",
    "The man is cooking dinner.",
    "Shares fell sharply on Monday.",
    "what is the boiling point of water at high altitude",
    "renal function after transplantation",
    "NAÏVE café, 日本語 and 🙂.",
    'She said "no", and left; nobody asked why.',
    "https://example.com/a?b=c&d=e 3.14159 -273.15 °C 1,000,000 $",
    "def add(a, b):\n    return a + b",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "no no no no no no no no no no no no no no no no no no no no",
    "The library lends books for three weeks. A reader may keep a book longer where nobody else has asked for it. "
    "Whoever returns one late pays a small fee, and a lost book is replaced at its price.",
    "Rain fell on the hills for nine days. " * 12,
    "Each town along the river keeps a record of its floods. " * 60,  # longer than the model reads
)


def embed() -> NDArray[np.float32]:
    """Vectors (20, d) of length 1, each text alone."""
    from cloze.encoding.bundle import Bundle
    from cloze.encoding.text import Batch
    from cloze.service.inference.session import Session

    class Unpadded(Session):
        """Runs each text alone: an emulated CPU would spend a minute on the padding of the canary texts."""

        def run(self, batch: Batch) -> NDArray[np.float32]:
            rows = (Batch(ids[None, mask > 0], mask[None, mask > 0]) for ids, mask in zip(*batch, strict=True))
            return np.concatenate([super(Unpadded, self).run(row) for row in rows])

    bundle = Bundle.load(MODEL)
    session = Unpadded.load(bundle, precision="int8", provider="cpu", threads=1)
    vectors = np.concatenate([session.run(bundle.text_encoder.batch([text])) for text in TEXTS])
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def main(arguments: list[str]) -> None:
    if arguments == ["--json"]:
        print(json.dumps(base64.b64encode(embed().tobytes()).decode()))
    else:
        np.save(FILE, embed())


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT)]
    main(sys.argv[1:])
