from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.tree import MAX_DEPTH, EnumValue, TensorRef, decode, dumps, encode, format_path, loads, same
from harness.errors import SnapshotCorrupt, StateError


class Phase(enum.Enum):
    WARM_UP = "warm-up"


class Level(enum.IntEnum):
    HIGH = 3


Point = namedtuple("Point", "x y")

# The format: changing a line here breaks every snapshot that exists.
PINNED: list[tuple[Any, str]] = [
    (None, "null"),
    (True, "true"),
    (1, "1"),
    (-(2**63), "-9223372036854775808"),
    (1.0, "1.0"),
    (-0.0, "-0.0"),
    (5e-324, "5e-324"),
    ("é", '"é"'),
    ([1, [2]], "[1,[2]]"),
    ([1, True, 2**63 - 1], "[1,true,9223372036854775807]"),
    ([1, 2**63], '[1,{"$":"int","hex":"8000000000000000"}]'),
    ([-(2**63) - 1, 1], '[{"$":"int","hex":"-8000000000000001"},1]'),
    ([1.5, math.inf], '[1.5,{"$":"float","value":"inf"}]'),
    ([1, 1.5], "[1,1.5]"),
    ({"b": 1, "a": {}}, '{"b":1,"a":{}}'),
    ((1, ()), '{"$":"tuple","items":[1,{"$":"tuple","items":[]}]}'),
    ({1: "x", "1": "y"}, '{"$":"dict","items":[[1,"x"],["1","y"]]}'),
    ({False: 0}, '{"$":"dict","items":[[false,0]]}'),
    ({"$": "set"}, '{"$":"dict","items":[["$","set"]]}'),
    (OrderedDict(b=1, a=2), '{"$":"ordered_dict","items":[["b",1],["a",2]]}'),
    (Counter({3: 2}), '{"$":"counter","items":[[3,2]]}'),
    ({"b", "a"}, '{"$":"set","items":["a","b"]}'),
    (frozenset({2, 1}), '{"$":"frozenset","items":[1,2]}'),
    (b"\x00\xff", '{"$":"bytes","base64":"AP8="}'),
    (bytearray(b"\x00"), '{"$":"bytearray","base64":"AA=="}'),
    (2**63, '{"$":"int","hex":"8000000000000000"}'),
    (-(2**70), '{"$":"int","hex":"-400000000000000000"}'),
    (math.nan, '{"$":"float","value":"nan"}'),
    (math.inf, '{"$":"float","value":"inf"}'),
    (-math.inf, '{"$":"float","value":"-inf"}'),
    ("\ud800", '{"$":"str","base64":"7aCA"}'),
    (numpy.float32(1.5), '{"$":"numpy","dtype":"<f4","base64":"AADAPw=="}'),
    (numpy.bool_(True), '{"$":"numpy","dtype":"|b1","base64":"AQ=="}'),
    (EnumValue("warm-up"), '{"$":"enum","value":"warm-up"}'),
    (TensorRef("m/w", "F32"), '{"$":"tensor","name":"m/w","dtype":"F32"}'),
    (
        TensorRef("m/w", "F64", "complex", (1, 0)),
        '{"$":"tensor","name":"m/w","dtype":"F64","kind":"complex","order":[1,0]}',
    ),
]


@pytest.mark.parametrize(("value", "text"), PINNED, ids=[text[:40] for _, text in PINNED])
def test_every_type_has_one_encoding_and_comes_back(value: Any, text: str) -> None:
    assert dumps(value).decode() == text
    assert json.loads(text) == encode(value)
    assert same(loads(text.encode()), value)


def numpy_scalars() -> st.SearchStrategy[Any]:
    kinds = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
    bits = st.tuples(st.sampled_from(kinds), st.binary(min_size=16, max_size=16))
    return bits.map(
        lambda drawn: numpy.frombuffer(drawn[1], drawn[0])[0] if drawn[0] != "?" else numpy.bool_(drawn[1][0])
    )


hashables = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=5)
    | st.binary(max_size=5)
    | st.builds(EnumValue, st.integers() | st.text(max_size=3)),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
refs = st.builds(
    TensorRef, st.text(max_size=5), st.sampled_from(["F32", "BF16"]), st.sampled_from(["plain", "numpy"]),
    st.permutations(range(3)).map(tuple),
)  # fmt: skip
trees = st.recursive(
    hashables | numpy_scalars() | refs | st.sets(hashables, max_size=3) | st.binary(max_size=5).map(bytearray),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(hashables, inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.just("$"), inner, max_size=3)
        | st.dictionaries(hashables, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(hashables, inner, max_size=3).map(Counter)
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(trees)
def test_whatever_can_be_encoded_comes_back_with_its_types(tree: Any) -> None:
    text = dumps(tree)
    back = loads(text)
    assert same(back, tree)
    assert dumps(back) == text


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (True, 1),
        (1, 1.0),
        (0.0, -0.0),
        ([1], (1,)),
        ({1: 0}, {True: 0}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, OrderedDict(a=1)),
        ({1}, {True}),
        (b"a", bytearray(b"a")),
        (numpy.float32(1), numpy.float64(1)),
        (numpy.float64(1), 1.0),
        (EnumValue(1), EnumValue(True)),
        ([1, 2], [1]),
        (math.nan, math.inf),
        (TensorRef("a", "F32"), TensorRef("b", "F32")),
    ],
)
def test_values_that_python_or_an_encoder_might_confuse_are_not_the_same(a: Any, b: Any) -> None:
    assert not same(a, b)
    assert not same(b, a)
    assert same(a, a)


def test_nan_is_the_same_as_nan() -> None:
    assert same({"a": [math.nan]}, {"a": [float("nan")]})
    assert same({float("nan")}, {float("nan")})


def test_an_enum_member_comes_back_as_its_value_and_never_as_its_class() -> None:
    assert loads(dumps([Phase.WARM_UP, Level.HIGH])) == [EnumValue("warm-up"), EnumValue(3)]


def test_a_set_is_encoded_alike_whatever_its_order() -> None:
    assert dumps({"a", 10, 9, (1,)}) == dumps({(1,), 9, "a", 10})


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (
            {"scheduler": {"lr_lambdas": [lambda step: step]}},
            ["scheduler.lr_lambdas[0]", "builtins.function", "load_state"],
        ),
        ({"a": defaultdict(list)}, ["a:", "collections.defaultdict", "plain dict"]),
        ({"a": [Point(1, 2)]}, ["a[0]:", "Point", "plain tuple"]),
        ({"a": {2: object()}}, ["a[2]:", "builtins.object"]),
        ({"a b": object()}, ["['a b']"]),
        ({object(): 1}, ["builtins.object"]),
        ({"a": numpy.zeros(2)}, ["a:", "numpy.ndarray", "state_dict()"]),
        ({"a": numpy.longdouble(1)}, ["a:", "numpy", ".item()"]),
        ({"a": numpy.str_("x")}, ["a:", "numpy"]),
        ({"a": type("Text", (str,), {})("x")}, ["a:", "Text", "plain str"]),
        (object(), ["the state:"]),
    ],
)
def test_what_cannot_be_encoded_is_refused_with_path_type_and_remedy(tree: Any, words: list[str]) -> None:
    with pytest.raises(StateError) as caught:
        encode(tree)
    for word in words:
        assert word in str(caught.value)


def test_a_path_given_by_the_caller_leads_the_message() -> None:
    with pytest.raises(StateError, match=r"^extra\.best\[1\]: "):
        encode([1, object()], path=("extra", "best"))


def test_a_path_reads_as_a_user_would_write_it() -> None:
    assert format_path(("model", "h.0.weight")) == "model.h.0.weight"
    assert format_path(("o", "state", 0, "exp avg")) == "o.state[0]['exp avg']"


def test_a_tree_that_contains_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["again"] = [loop]
    with pytest.raises(StateError, match=r"again\[0\]\.again.*contains itself"):
        encode(loop)


@pytest.mark.parametrize(
    "wrap", [lambda x: [x], lambda x: (x,), lambda x: {"a": x}, lambda x: Counter({1: x}), EnumValue]
)
def test_the_deepest_tree_that_can_be_encoded_can_be_decoded(wrap: Any) -> None:
    tree: Any = 1
    for _ in range(MAX_DEPTH):
        tree = wrap(tree)
    assert same(loads(dumps(tree)), tree)
    with pytest.raises(StateError):
        encode(wrap(tree))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1,",
        "\x00",
        '{"$":"pickle","base64":""}',
        '{"$":1}',
        '{"$":["tuple"],"items":[]}',
        '{"$":"tuple"}',
        '{"$":"tuple","items":{}}',
        '{"$":"tuple","items":[],"more":1}',
        '{"$":"set","items":[[1]]}',
        '{"$":"set","items":[1,1]}',
        '{"$":"dict","items":[[1]]}',
        '{"$":"dict","items":[[1,2],[1,3]]}',
        '{"$":"dict","items":[[1,2],[true,3]]}',
        '{"$":"dict","items":[[{"a":1},2]]}',
        '{"$":"dict","items":["ab"]}',
        '{"$":"bytes","base64":1}',
        '{"$":"bytes","base64":"A"}',
        '{"$":"bytes","base64":"é==="}',
        '{"$":"str","base64":"/w=="}',
        '{"$":"int","hex":"0x1"}',
        '{"$":"int","hex":"__1"}',
        '{"$":"int","hex":1}',
        '{"$":"float","value":"1.5"}',
        '{"$":"float","value":[]}',
        '{"$":"numpy","dtype":"O","base64":"AA=="}',
        '{"$":"numpy","dtype":"<f4","base64":"AA=="}',
        '{"$":"numpy","dtype":["<f4"],"base64":"AA=="}',
        '{"$":"tensor","name":1,"dtype":"F32"}',
        '{"$":"tensor","name":"a"}',
        '{"$":"tensor","name":"a","dtype":"F32","kind":"code"}',
        '{"$":"tensor","name":"a","dtype":"F32","kind":[]}',
        '{"$":"tensor","name":"a","dtype":"F32","order":[0,0]}',
        '{"$":"tensor","name":"a","dtype":"F32","order":"01"}',
        '{"$":"tensor","name":"a","dtype":"F32","size":1}',
        "9223372036854775808",
        "9" * 100_000,
        "1e999",
        "NaN",
        "[" * 100_000,
        '{"a":' * 100_000,
        "[" * 500 + "]" * 500,
        '{"$":"enum","value":' * 500 + "1" + "}" * 500,
        '{"$":"tuple","items":[' * 300 + "]}" * 300,
    ],
    ids=lambda text: text[:40],
)
def test_hostile_text_is_corrupt_and_nothing_worse(text: str) -> None:
    with pytest.raises(SnapshotCorrupt):
        loads(text.encode())


@pytest.mark.parametrize("value", [object(), {1: 2}, (1,), b"x", {"a": {1}}])
def test_what_no_json_parser_makes_is_corrupt(value: Any) -> None:
    with pytest.raises(SnapshotCorrupt):
        decode(value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["$", "items", "base64", "value", "hex", "dtype", "name"]), inner, max_size=4)
        | st.builds(
            lambda tag, items: {"$": tag, "items": items},
            st.sampled_from(["tuple", "set", "dict", "counter", "ordered_dict", "frozenset"]),
            inner,
        )
    ),
    max_leaves=20,
)


@settings(max_examples=300)
@given(json_values)
def test_any_json_is_decoded_or_corrupt(value: Any) -> None:
    try:
        tree = decode(value)
    except SnapshotCorrupt:
        return
    assert same(decode(encode(tree)), tree)


def test_more_values_than_can_be_read_back_are_neither_written_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine megabytes of empty objects took a trainer 174 MB and 14 s, and a record may have fifty times as many."""
    monkeypatch.setattr("harness.core.tree.MAX_VALUES", 1000)
    many = json.dumps([{}] * 1000).encode()

    with pytest.raises(SnapshotCorrupt, match="small state has more than 1,000 values"):
        loads(many)
    with pytest.raises(StateError, match=r"more than 1,000 values.*in tensors"):
        dumps([{}] * 1000)


def test_what_stands_in_strings_are_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.core.tree.MAX_VALUES", 10)
    text = {"prose": '[,{"' * 1000 + "\\"}

    assert loads(dumps(text)) == text


def test_values_are_counted_no_lower_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"a": [1, [], {}, {"b": None}], "c": (1, 2)}
    fits = next(most for most in range(100) if fits_in(monkeypatch, most, tree))

    assert 10 <= fits <= 20


def fits_in(monkeypatch: pytest.MonkeyPatch, most: int, tree: Any) -> bool:
    monkeypatch.setattr("harness.core.tree.MAX_VALUES", most)
    try:
        return bool(dumps(tree))
    except StateError:
        return False
