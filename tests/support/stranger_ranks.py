"""A reader of format 2, written from docs/format.md alone: what one rank of several had, in values and tensors."""

import json

import torch

from tests.support.stranger import decode, read_tensors


def read_newest(run, rank):
    commit = max((run / "commits").iterdir())
    manifest = json.loads(commit.read_bytes())
    assert manifest["format"] == 2, f"{commit}: format {manifest['format']}"
    parts, directory = manifest["parts"], run / "snapshots" / manifest["directory"]
    return decode(whole_state(parts[0], parts[rank]), tensors_of(directory, parts, rank))


def whole_state(first, mine):
    lacks, state = mine.get("lacks", ()), {**first["state"], **mine["state"]}
    states = {**first["state"]["states"], **mine["state"].get("states", {})}
    state["states"] = {name: node for name, node in states.items() if f"states/{name}" not in lacks}
    return {name: value for name, value in state.items() if name not in lacks}


def tensors_of(directory, parts, rank):
    shared, own = {}, {}
    for number, part in enumerate(parts):
        assert "files" not in part
        for name, tensor in read_tensors(directory, part["shards"]).items():
            piece = part["pieces"].get(name, {})
            if piece.get("own"):
                own |= {name: tensor} if number == rank else {}
            elif piece:
                whole = shared.setdefault(piece["tensor"], torch.empty(piece["whole"], dtype=tensor.dtype))
                box = zip(piece["offset"], tensor.shape, strict=True)
                whole[tuple(slice(at, at + count) for at, count in box)] = tensor
            else:
                shared[name] = tensor
    return shared | own
