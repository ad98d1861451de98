"""Writes safetensors files whose tensors are holes: they take no room on the disk."""

import json
import math


def write(file, tensors):
    """Writes float32 tensors of zeros, given their shapes by name."""
    header, end = {}, 0
    for name, shape in tensors.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
