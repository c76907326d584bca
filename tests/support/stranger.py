"""A reader written from docs/format.md alone: a run's newest snapshot as plain Python values and torch tensors."""

import base64
import json

import torch

DTYPES = "F64 float64 F32 float32 F16 float16 BF16 bfloat16 I64 int64 I32 int32 I16 int16 I8 int8 U8 uint8 BOOL bool"
TORCH = dict(zip(DTYPES.split()[::2], (getattr(torch, name) for name in DTYPES.split()[1::2]), strict=True))
CONTAINERS = {"tuple": tuple, "set": set, "dict": dict}


def read_latest(run):
    claim = max(path for path in (run / "generations").iterdir() if not path.name.endswith(".done.json"))
    run_id = json.loads(claim.read_bytes())["run_id"]
    for commit in sorted((run / "commits").iterdir(), reverse=True):
        if (run / "quarantine" / commit.name).exists():
            continue
        manifest = json.loads(commit.read_bytes())
        assert manifest["format"] == 1, f"{commit}: format {manifest['format']}"
        if manifest["run_id"] == run_id:
            part = manifest["parts"][0]
            return decode(part["state"], read_tensors(run / "snapshots" / part["directory"], part["shards"]))
    raise LookupError(f"no snapshot in {run}")


def read_tensors(directory, shards):
    tensors = {}
    for shard in shards:
        data = (directory / shard["name"]).read_bytes()
        assert (len(data), crc64nvme(data)) == (shard["size"], shard["crc64nvme"]), f"{shard['name']} is damaged"
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            begin, end = entry["data_offsets"]
            flat = torch.tensor(list(data[start + begin : start + end]), dtype=torch.uint8)
            tensors[name] = flat.view(TORCH[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def decode(value, tensors):
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: decode(item, tensors) for key, item in value.items()}
    if value["$"] == "tensor":
        return tensors[value["name"]]
    if value["$"] == "bytes":
        return base64.b64decode(value["base64"])
    return CONTAINERS[value["$"]](decode(value["items"], tensors))


def crc64nvme(data):
    crc = 2**64 - 1
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    return f"{crc ^ 2**64 - 1:016x}"
