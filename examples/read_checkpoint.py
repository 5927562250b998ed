"""Read whole tensors of a checkpoint with plain safetensors: `python examples/read_checkpoint.py runs/example`.

Every rank has saved its parts, boxes of the whole tensors, in a file of its own, under keys such as
`weight/layers.0.mlp.up.weight[0:64,0:32]`: what is stored, whose, and where in it the box lies.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
from safetensors import safe_open


def read(folder: Path, kind: str = "weight") -> dict[str, np.ndarray]:
    """Return the tensors of a kind ("weight", "exp_avg", ...) by parameter."""
    manifest = json.loads((folder / "manifest.json").read_text())
    shapes = {row["parameter"]: row["shape"] for row in manifest["tensors"] if row["kind"] == kind}
    whole = {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
    for file in manifest["files"]:
        with safe_open(folder / file["name"], "np") as stored:
            for key in list(stored.keys()):
                found = re.fullmatch(rf"{kind}/(.+)\[([0-9:,]*)\]", key)
                if found is not None:
                    ranges = (part.split(":") for part in found[2].split(",") if part)
                    box = tuple(slice(int(start), int(stop)) for start, stop in ranges)
                    whole[found[1]][box] = stored.get_tensor(key)
    return whole


if __name__ == "__main__":
    newest = max(Path(sys.argv[1]).glob("step_*"))
    for name, tensor in read(newest).items():
        print(f"{name}: {list(tensor.shape)}, norm {np.linalg.norm(tensor):.3f}")
